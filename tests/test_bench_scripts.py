"""The scripts in bench/ run, on sizes that time nothing: what a card's time is spent on must not end in a traceback."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from wgrad.autograd import creation
from wgrad.autograd.bench import timing

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without warming up, and with one sample of one call."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.chdir(BENCH.parent)
    for name in ("WARM_SECONDS", "SAMPLE_SECONDS"):
        monkeypatch.setattr(timing, name, 0.0)
    for name in ("SAMPLES", "FEWEST_SAMPLES", "_MOST_CALLS"):
        monkeypatch.setattr(timing, name, 1)
    monkeypatch.setattr(creation, "_devices", {})
    monkeypatch.setattr(creation, "_default", [*creation._default])
    monkeypatch.delitem(sys.modules, "common", raising=False)  # it has the numbers from `timing`


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
@pytest.mark.usefixtures("at_once", "shared_pipelines")
def test_a_script_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str) -> None:
    script, *arguments = command.split()
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--out", str(out)])
    try:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    finally:
        sys.modules.pop("common", None)  # of no other test
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    printed = capsys.readouterr().out
    assert rows and "failed" not in printed, printed[-2000:]
    assert all(row.get("error", 0.0) < 1e-2 for row in rows)
