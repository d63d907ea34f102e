"""The recipe of docs/contributing/objective.md: an entry in two tables makes an objective that runs everywhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from tests.train.conftest import SENTENCES
from tests.train.ranks_runs import command_of, needs_mpi, start, words
from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import OBJECTIVES, Objective, objectives_with
from wgrad.train.output.metrics import read_steps
from wgrad.train.step.objectives import LOSSES, Pairs


class Toy(Pairs):
    """DPO without its reference."""

    columns = 2

    def loss(self, inputs: Inputs) -> Tensor:
        return self._prefer(self._log_probs(inputs, 1), self.config.beta, self._first)


def register(objectives: dict[str, Objective] = OBJECTIVES, losses: dict[str, Any] = LOSSES) -> None:
    objectives["toy"] = Objective("prefers 'chosen'", "pairs", ("beta",))
    losses["toy"] = Toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    register(added := {}, losses := {})  # type: ignore[var-annotated]
    monkeypatch.setitem(OBJECTIVES, "toy", added["toy"])
    monkeypatch.setitem(LOSSES, "toy", losses["toy"])


@pytest.fixture
def values(make_checkpoint: Any, write_lines: Any, tmp_path: Path) -> dict[str, Any]:
    other = SENTENCES[1:] + SENTENCES[:1]
    pairs = ({"prompt": a, "chosen": f" {b}", "rejected": f" {a}"} for a, b in zip(SENTENCES, other))
    values = {"--model": make_checkpoint(num_hidden_layers=1), "--data": write_lines(*pairs), "--out": tmp_path / "out"}
    return values | {"--objective": "toy", "--device": "cpu", "--lora-r": 3, "--max-length": 64, "--batch-size": 2,
        "--gradient-accumulation-steps": 2, "--max-steps": 4, "--save-steps": 2, "--eval-fraction": 0.2,
        "--learning-rate": 5e-3,
        "--no-sample": True}  # fmt: skip


def test_every_objective_has_a_loss_and_options_that_exist() -> None:
    assert OBJECTIVES.keys() == LOSSES.keys()
    assert {name for kind in OBJECTIVES.values() for name in kind.options} <= RunOptions.hints.keys()


@pytest.mark.usefixtures("toy")
def test_a_run_and_its_resume(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *words(values)]) == 0
    assert "held-out loss before: 0." in capsys.readouterr().out
    out, again = tmp_path / "out", tmp_path / "again"
    steps = read_steps(out / "metrics.jsonl")
    assert len(steps) == 4 and all("rewards/margins" in record for record in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    shutil.copytree(out, again)
    for path in (again / WEIGHTS_FILE, again / "results.json", again / "checkpoints" / "step-4"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["finetune", "--out", str(again), "--resume"]) == 0
    assert (again / WEIGHTS_FILE).read_bytes() == (out / WEIGHTS_FILE).read_bytes()


@pytest.mark.usefixtures("toy")
def test_plan_knows_the_objective(values: dict[str, Any], wgpu_device: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name: values[name] for name in ("--model", "--max-length", "--lora-r")}
    found = []
    for more in ({"--objective": "toy", "--batch-size": 2}, {"--objective": "sft", "--batch-size": 4}):
        assert main(["plan", *words(options | more), "--device", "wgpu", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["peak_bytes"] == pytest.approx(found[1]["peak_bytes"], rel=0.2)  # a pair is two rows


@needs_mpi
def test_two_ranks_train_with_the_objective(values: dict[str, Any], tmp_path: Path, toy: None) -> None:
    assert main(["finetune", *words(values)]) == 0
    both = tmp_path / "both"
    before = "from tests.train.test_new_objective import register; register()"
    command = command_of(2, values | {"--out": both}, before=[before] * 2)
    run = start(command, environment={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
    assert run.returncode == 0, run.stderr
    one, other = (safetensors.numpy.load_file(out / WEIGHTS_FILE) for out in (tmp_path / "out", both))
    assert all(abs(one[name] - other[name]).max() < 1e-4 for name in one)


@pytest.mark.usefixtures("toy")
def test_options_and_messages_know_it() -> None:
    assert objectives_with("pairs").endswith(" or toy")
    assert RunOptions(objective="toy", batch_size=3).rows == 6  # type: ignore[arg-type]
    with pytest.raises(WgradError, match="toy trains an adapter, and --full all parameters"):
        RunOptions(objective="toy", full=True)  # type: ignore[arg-type]
    with pytest.raises(WgradError, match="--objective: must be one of sft, .*, toy; got 'tou'"):
        RunOptions(objective="tou")  # type: ignore[arg-type]
