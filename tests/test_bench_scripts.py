"""The scripts in bench/ run, on sizes that time nothing: what a GPU's time is spent on must not end in a traceback."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd import creation
from wgrad.autograd.bench import timing
from wgrad.autograd.reference import ReferenceDevice
from wgrad.train.commands.bench_model import SHAPES, build
from wgrad.train.model.adapter_files import load_adapter
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.lora import adaptable

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
        "bench_selective_scan.py --small",
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


@pytest.mark.usefixtures("at_once")
def test_peers_run_both_ways_and_name_their_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A peer that prints other things too, and fails at its last setting."""
    peak = {"0 1 0": 2.0, "0 1 1": 2.5, "0 4 0": 9.0, "1 1 0": 1.5}

    def run(command: list[str], **_: Any) -> Any:
        ways = [f"{a} {b} {c}" for a, b, c in zip(command[4::3], command[5::3], command[6::3])]
        assert ways == ["0 1 0", "0 1 1", "0 4 0", "0 4 1", "1 1 0", "1 1 1", "1 4 0", "1 4 1"]
        done = [(peak[way], *map(int, way.split())) for way in ways if way in peak]
        rows = [{"stack": "unsloth", "batch": n, "adapt_experts": bool(e), "peak_gib": p} for p, _, n, e in done]
        return SimpleNamespace(stdout="\n".join(["loading", *map(json.dumps, rows)]), stderr="out of memory")

    module = runpy.run_path(str(BENCH / "bench_train.py"))
    sys.modules.pop("common", None)
    monkeypatch.setattr(module["subprocess"], "run", run)
    module["peers"].__globals__["has_cuda"] = lambda: True
    args = argparse.Namespace(
        peers="tiny", stacks="unsloth", as_finetune=True, gradient_checkpointing=False, offload_activations=False,
        layers=0, max_length=64,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    report = SimpleNamespace(row=lambda **row: rows.append(row))
    found = module["peers"]("tiny", [1, 4], [False, True], args, report)
    assert found == {(1, False): 1.5, (1, True): 2.5, (4, False): 9.0}
    assert [row["work"] for row in rows] == ["tiny", "tiny, experts adapted", "tiny", "tiny"]
    assert "out of memory" in capsys.readouterr().out
    assert module["peers"]("smollm2-135m", [1], [False], args, report) == {}


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b", "tiny"])
@pytest.mark.usefixtures("at_once")
def test_a_peer_adapts_what_wgrad_adapts(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    others = {**SHAPES[name].others, "num_experts": 9, "num_local_experts": 9, "moe_intermediate_size": 32}
    shape = replace(SHAPES[name], **sizes, vocab=48, others=others if name != "tiny" else {})
    config = parse_model_config(shape.config())
    script = runpy.run_path(str(BENCH / "bench_train.py"))
    for experts in (False, True)[: 1 + (name != "tiny")]:
        mode = {"target_modules": script["WITH_EXPERTS"]} if experts else {}
        _, parameters = build(shape, 16, ReferenceDevice(), "float32", mode=mode)
        their_config = {key: value for key, value in shape.config().items() if key != "architectures"}
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**their_config))
        theirs = runpy.run_path(str(BENCH / "peer_peft.py"))["adapted"](
            base.to_empty(device="cpu"), their_config, experts
        )
        theirs.save_pretrained(tmp_path / str(experts))
        _, arrays = load_adapter(tmp_path / str(experts), *adaptable(config))
        assert {n: a.shape for n, a in arrays.items()} == {n: t.shape for n, t in parameters.tensors.items()}
        assert any(".experts." in n for n in arrays) == experts


def test_steps_on_more_gpus_are_predicted_from_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured step of two GPUs is met, and a slow network shows with several hosts alone."""
    monkeypatch.syspath_prepend(BENCH)
    found = []
    for network in ("12.5", "0.5"):
        monkeypatch.setattr(sys, "argv", ["predict_ranks.py", "--network", network])
        runpy.run_path(str(BENCH / "predict_ranks.py"), run_name="__main__")
        rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
        found.append({(row[0].strip("| "), int(row[1])): (float(row[2]), row[4].strip(" |")) for row in rows})
    fast, slow = found
    for work in ("llama-3.2-1b", "llama-3.1-8b"):
        taken, measured = fast[work, 2]
        assert taken == pytest.approx(float(measured), rel=0.02)
        assert fast[work, 8][0] == pytest.approx(taken, rel=0.01) and fast[work, 8] == slow[work, 8]
        assert fast[work, 8][0] < fast[work, 64][0] < slow[work, 64][0]
