"""The scripts in bench/ run, on sizes that time nothing: what a card's time is spent on must not end in a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Without warming up, and with one sample of one run.
_AT_ONCE = """
import runpy, sys
sys.path.insert(0, "bench")
import common
from wgrad.autograd.bench import timing
common.WARM_SECONDS = timing.WARM_SECONDS = timing.SAMPLE_SECONDS = 0.0
timing.SAMPLES = 1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "command",
    [
        "bench_attention.py --quick --dtype float16",
        "bench_gemm.py --small",
        "bench_reads.py --small",
        "bench_start.py --shapes tiny --cold",
        "bench_weights.py --rows 16 --shape 64x256 --formats q6_k",
        "bench_memory_ops.py --rows 64 --columns 128",
        "bench_transfers.py --sizes 64x128x64 --mib 1",
        "bench_train.py --shapes tiny --max-length 64 --offload-activations 1",
        "bench_autograd.py --tiny --steps 3 --device cpu",
        "bench_delta_rule.py --small",
        "bench_experts.py --small",
        "bench_decode.py --shapes tiny --prompts 2 --prompt-tokens 4 --tokens 4",
    ],
)
def test_a_script_writes_its_rows(wgpu_device: object, tmp_path: Path, command: str) -> None:
    script, *arguments = command.split()
    out = tmp_path / "rows.jsonl"
    run = [sys.executable, "-c", _AT_ONCE, f"bench/{script}", *arguments, "--out", str(out)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows and "failed" not in done.stdout, done.stdout[-2000:]
    assert all(row.get("error", 0.0) < 1e-2 for row in rows)
