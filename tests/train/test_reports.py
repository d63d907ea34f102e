"""--report-to: what other tools get of a run, once a step also when it is resumed, and that none of them can end it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wgrad.device.files import write_json
from wgrad.train.commands.cli import main
from wgrad.train.options.choices import REPORTERS
from wgrad.train.output.callbacks import Callback, Callbacks, EvaluationReport, StepReport
from wgrad.train.output.metrics import read_metrics
from wgrad.train.output.reporters import KINDS
from wgrad.train.output.reports import Reports
from wgrad.train.run.loop import Run

Finetune = Callable[..., int]

# Modules with the calls that the reporters make of the real ones, which write them down.
WANDB = """
calls = []
class Settings:
    def __init__(self, console): pass
class Run:
    id = "w1"
    def log(self, data, step):
        if step == 3:
            raise ConnectionError("the line\\nis down")
        calls.append(("log", step, data))
    def finish(self, exit_code): calls.append(("finish", exit_code))
def init(project, name, id, resume, config, dir, settings):
    calls.append(("init", project, name, id, resume, config["lora_r"]))
    return Run()
"""
TRACKIO = """
calls = []
class Run:
    def log(self, metrics, step): calls.append(("log", step, metrics))
    def finish(self): calls.append(("finish",))
def init(project, name, resume, config):
    calls.append(("init", project, name, resume, config["lora_r"]))
    return Run()
"""
MLFLOW = """
calls = []
class Run:
    class info: run_id = "m1"
def start_run(run_id=None, run_name=None):
    calls.append(("start", run_id, run_name))
    return Run()
def log_params(params): calls.append(("params", params["lora_r"]))
def log_metrics(metrics, step, run_id): calls.append(("log", step, metrics))
def end_run(status): calls.append(("end", status))
"""


@pytest.fixture
def finetune(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> Finetune:
    """Six steps; saved after 2, 4 and 6, measured after 3."""
    model = make_checkpoint(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    words = (
        f"--model {model} --data {text_data} --out {tmp_path / 'out'} "
        f"--device cpu --lora-r 2 --max-length 24 --no-sample"
    )
    words += (
        " --max-steps 6 --gradient-accumulation-steps 1 --batch-size 2 --save-steps 2 --eval-steps 3 --logging-steps 1"
    )
    return lambda *more: main(["finetune", *words.split(), *more])


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules above, to be imported in place of the real ones."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    found = {}
    for name, text in (("wandb", WANDB), ("trackio", TRACKIO), ("mlflow", MLFLOW)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "site" / f"{name}.py").write_text(text)
        found[name] = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, found[name])
    return found


class Killed(Exception):
    """An exception that a run does not handle."""


def killed_after(step: int, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process ends after it has written down this step."""
    write = Run._write

    def dies(self: Run, pending: Any, history: Any) -> None:
        write(self, pending, history)
        if pending[-1].step >= step:
            raise Killed

    monkeypatch.setattr(Run, "_write", dies)
    return monkeypatch


def expected(out: Path) -> dict[int, dict[str, float]]:
    """Return the values of metrics.jsonl and results.json for each step, by their names in reports."""
    found: dict[int, dict[str, float]] = {}
    for record in read_metrics(out / "metrics.jsonl"):
        group = "eval" if "held_out_loss" in record else "train"
        numbers = {k.removeprefix("held_out_"): v for k, v in record.items() if k != "step" and v is not None}
        found.setdefault(record["step"], {}).update({f"{group}/{k}": v for k, v in numbers.items()})
    found[0] = {"eval/loss": json.loads((out / "results.json").read_text())["held_out_loss_before"]}
    return found


@pytest.mark.oracle
def test_tensorboard_reads_each_step_once_from_a_run_that_was_killed(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(5, patch)
        finetune("--report-to", "tensorboard")
    assert finetune("--resume") == 0
    read = EventAccumulator(str(tmp_path / "out" / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        events = read.Scalars(tag)
        assert [event.step for event in events] == sorted({event.step for event in events}), tag
        for event in events:
            found.setdefault(event.step, {})[tag] = event.value
    wanted = expected(tmp_path / "out")
    assert sorted(found) == sorted(wanted) == list(range(7)) and "eval/loss" in found[3] and "eval/loss" in found[6]
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6), step  # they are float32 there
    assert not (tmp_path / "out" / "reports.json").exists()


def test_the_others_go_on_in_the_same_run_and_one_that_fails_gets_no_more(
    finetune: Finetune, modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (tmp_path / "out").mkdir()  # as of a run that ended before its first checkpoint
    write_json(tmp_path / "out" / "reports.json", {"wandb": "w0", "mlflow": "m0"})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(5, patch)
        finetune("--report-to", "wandb", "trackio", "mlflow")
    said = capsys.readouterr().out
    note = "note: --report-to wandb failed after step 3 (the line is down): it gets no more, the run goes on"
    assert said.count("--report-to") == 1 and note in said
    wandb, trackio, mlflow = (modules[name].calls for name in ("wandb", "trackio", "mlflow"))
    assert wandb[0] == ("init", "mine", "out", None, None, 2) and [call[1] for call in wandb[1:]] == [0, 1, 2]
    assert trackio[0][1] == "wgrad" and trackio[0][3:] == ("never", 2) and trackio[-1] == ("finish",)
    assert mlflow[:2] == [("start", None, "out"), ("params", "2")] and mlflow[-1] == ("end", "FAILED")
    name = trackio[0][2]
    assert name.startswith("out-")
    for calls in (wandb, trackio, mlflow):
        calls.clear()
    assert finetune("--resume") == 0
    assert wandb[0] == ("init", "mine", "out", "w1", "allow", 2) and wandb[-1] == ("finish", 0)
    assert trackio[0] == ("init", "wgrad", name, "allow", 2)
    assert mlflow[0] == ("start", "m1", None) and mlflow[1][0] == "log" and mlflow[-1] == ("end", "FINISHED")
    wanted = expected(tmp_path / "out")
    for calls in (wandb, trackio, mlflow):
        got: dict[int, dict[str, float]] = {}
        for _, step, values in calls[1:-1]:
            assert not values.keys() & got.setdefault(step, {}).keys()
            got[step] |= values
        assert got == {step: wanted[step] for step in (5, 6)}


def test_a_rank_that_takes_over_goes_on_in_the_run_of_the_one_that_is_lost(
    modules: dict[str, Any], tmp_path: Path
) -> None:
    lines: list[str] = []
    write_json(tmp_path / "reports.json", {"wandb": "w1", "mlflow": "m1"})
    report = StepReport(step=7, total_steps=9, loss=1.5, lr=0.1, grad_norm=None, tokens=3, tokens_per_second=2.0)
    with Reports(
        ["wandb", "mlflow"], str(tmp_path), {"lora_r": 2}, None, lines.append, is_main_process=False
    ) as reports:
        reports.on_step(report)
        assert not modules["wandb"].calls
        (tmp_path / "site" / "mlflow.py").unlink()
        modules["mlflow"].start_run = None
        reports.take_over()
        reports.on_step(replace(report, step=8, loss=float("nan")))
        for _ in range(2):
            reports.on_evaluation(EvaluationReport(9, 2.5, ()))
    numbers = {"train/lr": 0.1, "train/tokens": 3.0, "train/tokens_per_second": 2.0}
    begun = ("init", "wgrad", tmp_path.name, "w1", "allow", 2)
    assert modules["wandb"].calls == [begun, ("log", 8, numbers), ("log", 9, {"eval/loss": 2.5}), ("finish", 0)]
    failed = (
        "note: --report-to mlflow failed after step 7 ('NoneType' object is not callable): it gets no more, the run"
    )
    assert lines == [f"{failed} goes on"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlflow": "raise_ = None"}, "--report-to: mlflow cannot begin: module 'mlflow' has no attribute 'start_run'"),
        ({"mlflow": "import nowhere_at_all"}, "--report-to: mlflow cannot begin: No module named 'nowhere_at_all'"),
    ],
)
def test_one_that_cannot_begin_is_an_error_before_the_first_step(
    change: dict[str, str], message: str, finetune: Finetune, modules: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    for name, text in change.items():
        (tmp_path / "site" / f"{name}.py").write_text(text + "\n" * 9)
        monkeypatch.delitem(sys.modules, name)
    assert finetune("--report-to", "wandb,mlflow") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert modules["wandb"].calls[-1] == ("finish", 1) and not list((tmp_path / "out").glob("checkpoints/*"))


@pytest.mark.parametrize("name", REPORTERS)
def test_a_missing_tracker_ends_the_run_before_it_starts(
    name: str, finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == KINDS[name][0] else find(module))
    assert finetune("--report-to", name) == 2
    package = "'wgrad[tensorboard]'" if name == "tensorboard" else name
    error = f"--report-to: {name} needs a package that is not installed: pip install {package}"
    assert capsys.readouterr().err.splitlines()[-1] == f"wgrad: error: {error}"
    assert not (tmp_path / "out").exists()


def test_the_names_are_those_of_the_option() -> None:
    assert tuple(KINDS) == REPORTERS


def test_the_run_does_not_wait_for_reports() -> None:
    callbacks = Callbacks()
    callbacks.listen(Callback())
    assert not callbacks and Callbacks([Callback()])
