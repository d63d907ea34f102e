"""The learning rate of every step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from wgrad.train.options.finetune_config import FinetuneConfig, RunOptions
from wgrad.train.run.schedule import learning_rate, long_warmup, warmup_steps
from wgrad.train.run.session import open_session


def rates(total: int, **options) -> list[float]:
    config = RunOptions(learning_rate=0.5, **options)
    return [learning_rate(config, step, total) for step in range(total)]


@pytest.mark.parametrize(
    ("warmup", "total", "steps"), [(0, 41, 0), (0.03, 41, 2), (0.5, 7, 4), (1, 41, 1), (9, 41, 9), (99, 41, 99)]
)
def test_warmup_is_a_share_or_a_number(warmup: float, total: int, steps: int) -> None:
    assert warmup_steps(RunOptions(warmup_steps=warmup), total) == steps


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 0.1, 7, 41])
def test_it_rises_then_falls_and_every_step_moves(schedule: str, warmup: float) -> None:
    values = rates(41, lr_scheduler_type=schedule, warmup_steps=warmup)
    up = warmup_steps(RunOptions(warmup_steps=warmup), 41)
    assert all(0 < v <= 0.5 for v in values)
    assert values[:up] == pytest.approx([0.5 * (i + 1) / up for i in range(up)])
    rest = values[up:]
    assert rest == sorted(rest, reverse=True)
    if rest:
        assert rest[0] == 0.5


def test_schedules_have_their_shapes_after_the_warmup() -> None:
    assert rates(10, lr_scheduler_type="constant", warmup_steps=0) == [0.5] * 10
    assert rates(10, lr_scheduler_type="linear", warmup_steps=0) == pytest.approx(
        [0.5 * (10 - i) / 10 for i in range(10)]
    )
    assert rates(10, lr_scheduler_type="cosine", warmup_steps=2)[2:] == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warmup_longer_than_the_run_does_not_reach_the_peak(schedule: Any) -> None:
    """As in transformers, which is a step behind, and said in a note."""
    assert rates(41, lr_scheduler_type=schedule, warmup_steps=99) == pytest.approx([0.5 * n / 99 for n in range(1, 42)])
    config = RunOptions(learning_rate=0.5, lr_scheduler_type=schedule, warmup_steps=99)
    assert "more than the run's 41 steps, so its learning rate reaches only 2.07e-01" in long_warmup(config, 41)
    assert long_warmup(config, 99) == ""


def test_beyond_the_end_it_does_not_rise_again() -> None:
    config = RunOptions(learning_rate=0.5)
    assert learning_rate(config, 60, 41) == pytest.approx(0.0)


def test_a_run_says_when_its_data_make_too_few_steps(
    make_checkpoint: Any, text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how many epochs make enough. 32 short texts share few sequences."""
    options: dict[str, Any] = {"model": str(make_checkpoint()), "data": (str(text_data),), "out": str(tmp_path / "out")}
    few = "note: the run has only 1 step, which is little to learn from: --epochs 50 makes it 50 or more"
    for more, said in (({}, few), ({"max_steps": 1}, ""), ({"epochs": 49}, "49 steps,"), ({"epochs": 50}, "")):
        open_session(FinetuneConfig(**{**options, "device": "cpu", "eval_fraction": 0, **more}))
        (note,) = [line for line in capsys.readouterr().out.splitlines() if "has only" in line] or [""]
        assert said in note and bool(said) == bool(note)
    open_session(FinetuneConfig(**options, device="cpu", eval_fraction=0, max_steps=2, warmup_steps=3))
    assert "note: --warmup-steps 3 is more than the run's 2 steps" in capsys.readouterr().out
