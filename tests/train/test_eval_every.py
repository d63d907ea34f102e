"""Evaluation during a run: on a schedule, with any number of ranks, stopped and resumed, and the files it leaves."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.train import ranks_runs
from wgrad.device.errors import WgradError
from wgrad.train.commands.cli import main
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.options.finetune_config import FinetuneConfig, RunOptions
from wgrad.train.output.checkpoints import STATE_FILE
from wgrad.train.output.metrics import read_metrics
from wgrad.train.output.previous_run import previous_run
from wgrad.train.run.loop import Run
from wgrad.train.run.scheduled import BestSteps

pytestmark = pytest.mark.usefixtures("short_samples")

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
PROMPTS = ["the early bird", "a journey"]


# ---- which steps, and when it is enough --------------------------------------------------------
def steps_of(losses: list[float], **options: Any) -> BestSteps:
    """One measured loss every two steps."""
    config = RunOptions(**({"eval_steps": 2} | options))
    return BestSteps(config, [(2 * (i + 1), loss) for i, loss in enumerate(losses)])


def test_a_measure_is_due_once_every_so_many_steps() -> None:
    steps = steps_of([3.0])
    assert [s for s in range(9) if steps.due(s)] == [4, 6, 8]
    assert not any(BestSteps(RunOptions()).due(s) for s in range(9))


def test_the_best_is_the_lowest_and_of_equal_ones_the_first() -> None:
    nan = float("nan")
    assert steps_of([3.0, 2.0, nan, 2.0, 1.5]).best() == [10, 4, 8, 2]
    assert steps_of([nan]).best() == []
    assert steps_of([3.0, 2.0, 2.5], keep_best=2).kept() == [4, 6] and steps_of([3.0, 2.0]).kept() == []
    assert steps_of([3.0, 2.0], early_stopping_patience=5).kept() == [4]


@pytest.mark.parametrize(
    ("losses", "waited"),
    [([3.0], 0), ([3.0, 3.0], 1), ([3.0, 4.0, 2.9], 0), ([3.0, 4.0, 3.1], 2), ([float("nan")] * 2, 2), ([], 0)],
)
def test_patience_counts_the_measures_since_the_best(losses: list[float], waited: int) -> None:
    assert steps_of(losses).without_better == waited
    assert [steps_of(losses, early_stopping_patience=patience).stop for patience in (0, 1, 2)] == [
        False,
        waited > 0,
        waited > 1,
    ]
    saved = json.loads(json.dumps(steps_of(losses).saved()))  # as a checkpoint has it
    assert BestSteps(RunOptions(), saved).without_better == waited


# ---- runs --------------------------------------------------------------------------------------
Runner = Callable[..., int]


@pytest.fixture
def values(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> dict[str, Any]:
    """A run whose held-out loss soon rises: it learns 5 texts by heart."""
    text_data.write_text("".join(text_data.read_text().splitlines(keepends=True)[:10]))
    model = make_checkpoint(hidden_size=16, intermediate_size=24, **SIZES)
    options = f"--model {model} --data {text_data} --device cpu --lora-r 2 --max-length 24 --no-packing --max-steps 14"
    options += (
        " --logging-steps 1 --learning-rate 0.1 --lr-scheduler-type constant --warmup-steps "
        "0 --gradient-accumulation-steps 2 --batch-size 2 --lora-dropout 0.1"
    )
    options += " --eval-fraction 0.5 --save-steps 5 --eval-steps 2 --early-stopping-patience 2 --keep-best 2"
    words = options.replace("--no-packing ", "").split()
    return dict(zip(words[::2], words[1::2])) | {"--no-packing": True, "--out": tmp_path / "out"}


def run(values: dict[str, Any], *more: str) -> int:
    prompts = [word for prompt in PROMPTS for word in ("--sample-prompt", prompt)]
    return main(["finetune", *ranks_runs.words(values), *prompts, *more])


def measured(out: Path) -> dict[int, float]:
    return {r["step"]: r["held_out_loss"] for r in read_metrics(out / "metrics.jsonl") if "held_out_loss" in r}


def results(out: Path) -> dict[str, Any]:
    found = json.loads((out / "results.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "peak_bytes")}


def checkpoints(out: Path) -> set[str]:
    return {path.name for path in (out / "checkpoints").iterdir()}


def everything(out: Path) -> tuple[Any, ...]:
    of_machine = ("tokens_per_second", "memory_bytes")
    records = [{k: v for k, v in r.items() if k not in of_machine} for r in read_metrics(out / "metrics.jsonl")]
    samples = (out / "samples.jsonl").read_text()
    return results(out), records, samples, (out / WEIGHTS_FILE).read_bytes(), checkpoints(out)


def test_a_run_stops_early_with_its_best_step_and_resumes_to_the_same_bits(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = values["--out"]
    assert run(values) == 0
    said, found = capsys.readouterr().out, measured(whole)
    best, last = min(found, key=lambda step: found[step]), max(found)
    assert sorted(found) == list(range(0, last + 1, 2)) and best == last - 4 and 2 <= best, found
    assert (
        f"stopped early after step {last}: 2 measures without a better loss than {found[best]:.4f} (step {best})"
        in said
    )
    assert f"held-out loss at step 2: {found[2]:.4f} (perplexity " in said
    # The best is what --out holds; its checkpoint and that of the second best are kept, and the newest two.
    state = whole / "checkpoints" / f"step-{best}"
    assert (whole / WEIGHTS_FILE).read_bytes() == (state / WEIGHTS_FILE).read_bytes()
    second = sorted(found, key=lambda step: found[step])[1]
    assert {f"step-{best}", f"step-{second}", f"step-{last}"} <= checkpoints(whole) and len(checkpoints(whole)) <= 4
    expected = {"held_out_loss_after": found[best], "result_step": best, "steps": last, "stopped_early": 2}
    assert expected.items() <= results(whole).items()
    # Every prompt at every moment, once.
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [(step, p) for step in sorted(found) for p in PROMPTS]
    assert results(whole)["sample_after"] == next(s["text"] for s in samples if s["step"] == best)

    # Asked to end after each step in turn: right after it, or when it is being measured.
    interrupted, calls = values | {"--out": tmp_path / "parts"}, [0]
    collect = Run._collect
    statuses: list[int] = []

    def ask(self: Run, *, wait: bool) -> None:
        collect(self, wait=wait)
        calls[0] += 1
        if calls[0] > len(statuses) % 2:
            self.interrupts.asked = signal.SIGTERM

    monkeypatch.setattr(Run, "_collect", ask)
    while not statuses or statuses[-1] == 128 + signal.SIGTERM:
        assert len(statuses) <= 2 * last
        calls[0] = 0
        statuses.append(run(interrupted, *["--resume"][: len(statuses)]))
    assert statuses[-1] == 0 and len(statuses) > last
    parts, once = everything(tmp_path / "parts"), everything(whole)
    assert parts[:4] == once[:4] and {f"step-{best}", f"step-{second}", f"step-{last}"} <= parts[4]


def test_a_run_that_was_stopped_goes_on_with_more_patience_only(tmp_path: Path) -> None:
    length = {"format": 1, "steps": 8, "max_steps": 12, "epochs": 1, "stopped_early": 2}
    (tmp_path / "results.json").write_text(json.dumps(length))
    (tmp_path / "checkpoints" / "step-8").mkdir(parents=True)

    def again(**options: Any) -> FinetuneConfig:
        given = {"eval_steps": 2, "early_stopping_patience": 2, "max_steps": 12, **options}
        return FinetuneConfig(model="m", data=("d",), out=str(tmp_path), resume=True, **given)

    assert previous_run(again()).finished and previous_run(again()).stopped
    for patience in (3, 0):
        assert previous_run(again(early_stopping_patience=patience)).ended_at == 8
    with pytest.raises(
        WgradError, match="^--max-steps: would be ignored: --early-stopping-patience 2 ended the run .* after step 8"
    ):
        previous_run(again(max_steps=20))


def test_a_best_checkpoint_that_is_damaged_gives_way_to_the_next(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the last step is one of those that count."""
    values |= {"--max-steps": 5, "--early-stopping-patience": 0, "--keep-best": 1, "--learning-rate": 1e-3}
    end = Run.train

    def damaged(self: Run) -> None:
        end(self)
        (values["--out"] / "checkpoints" / "step-4" / STATE_FILE).write_bytes(b"?")

    monkeypatch.setattr(Run, "train", damaged)
    monkeypatch.setattr(
        "wgrad.train.step.trainer.Trainer.measure", lambda self, *args: (9.0 - self.optimizer.applied() % 5, {})
    )
    assert run(values) == 0
    assert measured(values["--out"]) == {0: 9.0, 2: 7.0, 4: 5.0, 5: 9.0}
    said = capsys.readouterr().out
    assert "note: the checkpoint of step 4 is damaged" in said and "note: the checkpoint of step 2 is damaged" in said
    assert results(values["--out"])["result_step"] == 5


@ranks_runs.needs_mpi
def test_two_ranks_measure_and_stop_as_one(values: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "still waters run deep"}\n' * 9)
    values["--data"] = [f"{values['--data']}=2", f"{other}=1"]
    # What is held out has nothing of what is learned: its loss rises by far more than CPUs differ.
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"text": "0123456789 9876543210 %$&"}\n' * 5)
    values["--eval-data"] = held_out
    del values["--eval-fraction"]
    alone = values | {"--out": tmp_path / "one", "--no-sample": True}
    assert main(["finetune", *ranks_runs.words(alone)]) == 0
    done = ranks_runs.finetune(2, values | {"--sample-prompt": PROMPTS[0]})
    assert done.returncode == 0, done.stderr
    ours, one = measured(values["--out"]), measured(tmp_path / "one")
    assert list(ours) == list(one) and np.allclose(list(ours.values()), list(one.values()), rtol=1e-4)
    for key in ("result_step", "steps", "stopped_early"):
        assert results(values["--out"])[key] == results(tmp_path / "one")[key]
    adapters = [load_file(out / WEIGHTS_FILE) for out in (values["--out"], tmp_path / "one")]
    for name in adapters[0]:
        np.testing.assert_allclose(adapters[0][name], adapters[1][name], rtol=0, atol=2e-3)
    log = (values["--out"] / "ranks" / "rank-1.log").read_text()
    assert "stopped early after step" in log and done.stdout.count("held-out loss at step 2:") == 1
    shutil.rmtree(values["--out"])
