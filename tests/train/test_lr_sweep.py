"""--lr-sweep: each rate has the run that it would have alone; there is one table, and no other output."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgrad
from tests.train.ranks_runs import words
from wgrad.device.errors import UnusableResult, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.output.metrics import read_steps
from wgrad.train.run.loop import Run
from wgrad.train.run.sweep import Row, Sweep, table

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}


@pytest.fixture
def values(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> dict[str, Any]:
    model = make_checkpoint(hidden_size=16, intermediate_size=24, **SIZES)
    found = {"--model": model, "--data": text_data, "--out": tmp_path / "out", "--device": "cpu", "--lora-r": 2}
    return found | {
        "--max-length": 24,
        "--gradient-accumulation-steps": 2,
        "--max-steps": 4,
        "--eval-fraction": 0.2,
        "--lora-dropout": 0.1,
    }


def test_each_rate_has_the_run_that_it_would_have_by_itself(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second rate gives no finite numbers, the third ends within its steps; the fourth begins as the first did."""
    sweep = ["--lr-sweep", "1e-3,1e38", "7,3e-2"]
    train = Run.train

    def end(self: Run) -> None:
        if self.config.learning_rate != 7:
            return train(self)
        self.trainer.step(self.stream.get(2), 7.0)
        raise UnusableResult("as after 20 steps without an update")

    monkeypatch.setattr(Run, "train", end)
    with np.errstate(all="ignore"):
        assert main(["finetune", *words(values), *sweep]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "sweep.json"]
    assert found["steps"] == 4 and [run["lr"] for run in found["runs"]] == [1e-3, 1e38, 7, 3e-2]
    assert [run["held_out_loss"] is None for run in found["runs"]] == [False, True, True, False]
    assert found["best_lr"] == 3e-2
    for run in (found["runs"][0], found["runs"][3]):
        alone = values | {"--out": tmp_path / str(run["lr"]), "--learning-rate": run["lr"], "--no-sample": True}
        assert main(["finetune", *words(alone)]) == 0
        results = json.loads((tmp_path / str(run["lr"]) / "results.json").read_text())
        assert results["held_out_loss_after"] == run["held_out_loss"]
        losses = [record["loss"] for record in read_steps(tmp_path / str(run["lr"]) / "metrics.jsonl")]
        assert run["loss"] == sum(losses) / len(losses) and len(losses) == 4
        assert results["held_out_loss_before"] == found["held_out_loss_before"]
        assert f"{run['lr']:>14g} {run['loss']:>14.4f} {run['held_out_loss']:>14.4f}" in said
    assert "not finite     not finite" in said
    capsys.readouterr()
    assert main(["finetune", *words(values), *sweep]) == 2
    assert "already holds a sweep (sweep.json)" in capsys.readouterr().err


def test_an_interrupted_sweep_leaves_nothing(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Run._collect

    def ask(self: Run, *, wait: bool) -> None:
        step(self, wait=wait)
        self.interrupts.asked = signal.SIGTERM

    monkeypatch.setattr(Run, "_collect", ask)
    assert main(["finetune", *words(values), "--lr-sweep", "1e-3,1e-2"]) == 128 + signal.SIGTERM
    assert "interrupted: nothing is kept of a sweep: begin it anew" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("[!.]*"))

    def stop(self: Sweep, when: str) -> None:  # between the runs
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "_held_out", stop)
    assert main(["finetune", *words(values), "--lr-sweep", "1e-3,1e-2"]) == 128 + signal.SIGINT
    assert "interrupted: nothing is kept of a sweep: begin it anew" in capsys.readouterr().err


def test_the_table_says_where_to_look_further() -> None:
    rows = [Row(1e-4, 3.0, 3.1, 0), Row(1e-3, 2.0, 2.1, 0), Row(1e-2, None, None, 7)]
    lines = table(rows, 4.0, 1e-3)
    assert len(lines) == 4 and lines[2].endswith("best") and lines[3].endswith("7 steps skipped")
    assert table(rows[:2], 4.0, 1e-3)[-1] == "the best is at the end of those tried: higher ones may be better still"
    assert table(rows, 4.0, 1e-4)[-1].endswith("lower ones may be better still")


def test_a_function_has_no_result_of_it() -> None:
    with pytest.raises(WgradError, match="--lr-sweep: comes to no result that a function returns"):
        wgrad.finetune(model="m", data="d", out="o", lr_sweep=[1e-3, 1e-2])  # type: ignore[arg-type]
