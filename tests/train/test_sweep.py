"""`wgrad sweep`: the combinations, a table and the best run, what goes on, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wgrad
from tests.train.conftest import SENTENCES
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.commands.cli import main
from wgrad.train.options.sweep_options import read_vary, trials_of, vary_of
from wgrad.train.run import trials
from wgrad.train.run.trials import table
from wgrad.train.terminal.interrupts import Interrupted

pytestmark = pytest.mark.usefixtures("short_samples")


@pytest.fixture
def words(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> list[str]:
    model = make_checkpoint(num_hidden_layers=1)
    return ["sweep", "--model", str(model), "--data", str(text_data), "--out", f"{tmp_path}/out", "--device", "cpu",
            "--max-steps", "2", "--max-length", "24", "--eval-fraction", "0.2", "--no-sample",
            "--gradient-accumulation-steps", "1"]  # fmt: skip


GRID = ["--vary", "learning_rate=1e-3,2e-2", "--vary", "lora-r=2,3"]


def test_a_grid_and_its_best_run(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main([*words, *GRID]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "out" / "trials.json").read_text())
    assert [run["options"] for run in found["runs"]] == [
        {"learning_rate": lr, "lora_r": r} for lr in (1e-3, 2e-2) for r in (2, 3)
    ]
    losses = {run["folder"]: run["held_out_loss"] for run in found["runs"]}
    for folder, loss in losses.items():
        results = json.loads((tmp_path / "out" / folder / "results.json").read_text())
        assert results["held_out_loss_after"] == loss and (tmp_path / "out" / folder / "adapter_config.json").exists()
    best = min(losses, key=lambda folder: losses[folder])
    assert found["best"] == best and lines[-1].startswith(f"best: {best} (learning_rate ")
    assert sum("(best)" in line for line in lines) == 1
    # Once more: nothing runs, and the same is said.
    assert main([*words, *GRID]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[-6:] == lines[-6:] and not any("training:" in line for line in again)
    assert main([*words, *GRID, "--weight-decay", "0.1"]) == 2
    assert "holds a sweep with another weight_decay" in capsys.readouterr().err
    assert main([*words, "--vary", "lora_r=2,3"]) == 2
    assert "holds a sweep with other values of --vary or --trials" in capsys.readouterr().err
    (tmp_path / "out" / best / "results.json").write_text('{"steps": "two"}')
    (tmp_path / "out" / "trials.json").unlink()
    assert main([*words, *GRID]) == 2
    assert f"{best}: the trial then runs again" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on(words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The second run was at its first step, which is saved."""
    real, ran = trials.run_finetune, list[tuple[str, bool]]()

    def run(config: Any, caller: Any) -> int:
        ran.append((Path(config.out).name[:3], config.resume))
        if len(ran) == 2:
            (Path(config.out)).mkdir(parents=True)
            config.save(config.out)
            raise Interrupted(2, "interrupted after step 1 of 2, which is saved; go on with --resume")
        return real(config, caller)

    monkeypatch.setattr(trials, "run_finetune", run)
    assert main([*words, "--vary", "lora_r=2,3"]) == 130
    assert "interrupted in trial 2 of 2: the same command goes on" in capsys.readouterr().err
    assert main([*words, "--vary", "lora_r=2,3"]) == 0
    assert ran == [("001", False), ("002", False), ("002", True)]


def test_fewer_combinations_than_trials_are_noted(words: list[str], monkeypatch: Any, capsys: Any) -> None:
    """A note says so: without one it seems that the other trials were lost."""

    def run(config: Any, caller: Any) -> int:
        raise OutOfMemory("it does not fit")

    monkeypatch.setattr(trials, "run_finetune", run)
    note = "note: --trials 5: there are only 2 different combinations of the values of --vary: each runs once"
    for given, noted in (("5", True), ("2", False)):
        assert main([*words, "--vary", "lora_r=2,3", "--trials", given]) == 1
        said = capsys.readouterr()
        assert (note in said.err) == noted and "trial 2 of 2: lora_r" in said.out


def test_a_trial_that_fails_ends_no_other(words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    real = trials.run_finetune

    def run(config: Any, caller: Any) -> int:
        if config.lora_r == 2:
            raise OutOfMemory("it does not fit")
        return real(config, caller)

    monkeypatch.setattr(trials, "run_finetune", run)
    assert main([*words, "--vary", "lora_r=2,3"]) == 0
    said = capsys.readouterr()
    assert "trial 1 failed: it does not fit" in said.err and "best: 002-lora_r=3" in said.out
    assert main([*words[:6], f"{tmp_path}/other", *words[7:], "--vary", "lora_r=2"]) == 1
    assert "no trial has a held-out loss" in capsys.readouterr().err


def test_values_and_ranges_of_options_are_parsed() -> None:
    assert read_vary("packing=true,false").values == (True, False)
    assert read_vary("--target-modules=q_proj,v_proj;all-linear").values == (("q_proj", "v_proj"), ("all-linear",))
    assert read_vary("lr=1e-4, 3e-4,1e-4").values == (1e-4, 3e-4)  # a former name, and one value twice
    drawn = trials_of([read_vary("learning_rate=1e-5..1e-3"), read_vary("lora_r=4..8")], 30, seed=1)
    assert drawn == trials_of([read_vary("learning_rate=1e-5..1e-3"), read_vary("lora_r=4..8")], 30, seed=1)
    assert all(1e-5 <= one["learning_rate"] <= 1e-3 and 4 <= one["lora_r"] <= 8 for one in drawn) and len(drawn) == 30
    assert {one["lora_r"] for one in drawn} == {4, 5, 6, 7, 8}
    assert len(trials_of([read_vary("lora_r=2,3")], 10, seed=0)) == 2  # there are no more


def test_a_failed_trial_is_a_row_of_the_table() -> None:
    row = {"folder": "001", "options": {"lora_r": 2}, "held_out_loss": None, "steps": None, "seconds": None}
    assert table([{**row, "error": "x"}])[-1].split() == ["1", "2", "failed", "-", "-"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--vary is required"),
        (["--vary", "lora_r"], "--vary: expected NAME=VALUE,VALUE, got 'lora_r'"),
        (["--vary", "lora_r= ,"], "--vary: expected NAME=VALUE,VALUE, got 'lora_r= ,'"),
        (["--vary", "rnak=3"], "--vary: 'rnak' is no option that can vary (did you mean lora_r?)"),
        (["--vary", "out=a,b"], "--vary: 'out' is no option that can vary: see"),
        (["--vary", "lora_r=0,1"], "--vary: lora_r: must be at least 1; got 0"),
        (["--vary", "lora_r=a"], "--vary: lora_r: expected a whole number, got 'a'"),
        (["--vary", "lora_r=8..2", "--trials", "2"], "a range goes from the lower to the higher"),
        (["--vary", "lora_r=2..8"], "lora_r is a range, from which values are drawn: give --trials N"),
        (["--vary", "lora_r=2", "--vary", "lora_r=3"], "--vary: lora_r is given twice"),
        (["--vary", "lora_r=2", "--trials", "0"], "--trials: must be a whole number between 1 and 1000"),
        (["--vary", "lora_r=2", "--ranks", "2"], "--ranks: has no place in a sweep"),
        (["--vary", "lora_r=2", "--lr-sweep", "1e-4", "2e-4"], "--lr-sweep: has no place in a sweep"),
        (["--vary", "lora_r=2", "--resume"], "--resume: has no place in a sweep"),
        (["--vary", "eval_steps=0,5", "--eval-fraction", "0"], "--eval-steps: nothing is held out"),
    ],
)
def test_mistakes_are_refused(more: list[str], message: str, words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_sweep_runs_from_python(make_checkpoint: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Records in place of files, a callback that is told of each trial, one that fails, and once more."""
    steps = list[int]()
    options: dict[str, Any] = {
        "model": make_checkpoint(num_hidden_layers=1), "data": [{"text": t} for t in SENTENCES * 3], "device": "cpu",
        "out": tmp_path / "out", "max_steps": 2, "max_length": 24, "eval_fraction": 0.2, "sample": False,
        "callbacks": [lambda report: steps.append(report.step)],
    }  # fmt: skip
    real = trials.run_finetune

    def run(config: Any, caller: Any) -> int:
        if config.lora_r == 4:
            raise OutOfMemory("it does not fit")
        return real(config, caller)

    monkeypatch.setattr(trials, "run_finetune", run)
    found = wgrad.sweep(vary={"lora_r": [2, 4], "lr": "1e-3,2e-2"}, **options)
    assert [trial.options["lora_r"] for trial in found.trials] == [2, 2, 4, 4] and steps == [1, 2] * 2
    assert found.best.held_out_loss == min(t.held_out_loss for t in found.trials if t.held_out_loss is not None)
    assert found.best.result().held_out_loss_after == found.best.held_out_loss and found.trials[2].error
    with pytest.raises(WgradError, match="this trial failed: it does not fit"):
        found.trials[2].result()
    assert capsys.readouterr().out == ""
    again = wgrad.sweep(vary={"lora_r": [2, 4], "learning_rate": [1e-3, 2e-2]}, **options)
    assert again.best == found.best and steps == [1, 2] * 2
    assert vary_of("lora-r", "2..8").high == 8 and vary_of("packing", [True, False]).values == (True, False)
    wrong: list[tuple[Any, str]] = [({}, "must be a mapping"), ({"lora_r": 3}, "must be a list of values")]
    wrong += [({"out": ["a"]}, "is no option that can vary")]
    for given, message in wrong:
        with pytest.raises(WgradError, match=message):
            wgrad.sweep(vary=given, **options)
    with pytest.raises(WgradError, match="--trials: must be a whole number"):
        wgrad.sweep(vary={"lora_r": [2]}, trials=0, **options)
