"""Callbacks of a run. Each gets a frozen dataclass, and may end the run."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.options.option_names import did_you_mean


@dataclass(frozen=True)
class StepReport:
    """An optimizer step that the device has finished.

    Attributes:
        step: Number of the step, from 1.
        total_steps: Steps of the run.
        loss: Mean nats per target token.
        lr: Learning rate.
        grad_norm: Norm of the gradient before clipping; None: it was not finite, and the step was skipped.
        tokens: Tokens of the step.
        tokens_per_second: Recent speed of the run.
        metrics: Further values of the step in metrics.jsonl.
    """

    step: int
    total_steps: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    tokens_per_second: float
    metrics: Mapping[str, Any] = field(default_factory=dict)


def step_report(record: Mapping[str, Any], total_steps: int) -> StepReport:
    """Make a report from a record of metrics.jsonl."""
    names = {f.name for f in fields(StepReport)} - {"total_steps", "metrics"}
    more = {name: value for name, value in record.items() if name not in names}
    known: dict[str, Any] = {name: record.get(name) for name in names}
    return StepReport(total_steps=total_steps, metrics=more, **known)


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation.

    Attributes:
        step: Steps done before it; 0: before the first.
        loss: Mean nats per held-out token; None: nothing is held out.
        texts: Continuation of each prompt; None: the model's logits were not finite.
        metrics: The objective's and the caller's metrics.
    """

    step: int
    loss: float | None
    texts: tuple[str | None, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """e to the loss; None: nothing is held out."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class SaveReport:
    """A complete checkpoint.

    Attributes:
        step: Steps done.
        folder: Its folder, with the adapter in PEFT's format (not with full=True).
    """

    step: int
    folder: Path


@dataclass(frozen=True)
class RateReport:
    """A step that is about to begin.

    Attributes:
        step: Number of the step, from 1.
        total_steps: Steps of the run.
        lr: Learning rate of the schedule, or of the callback before this one.
    """

    step: int
    total_steps: int
    lr: float


class Callback:
    """Base class of callbacks: override the methods that you need.

    A method that returns True ends the run after the reported step (an evaluation before training: after the first
    step), as if that were the last: the result is written and evaluated. An exception ends the run at once and reaches
    the caller; resume=True continues from the last checkpoint.
    """

    def on_step(self, report: StepReport) -> bool | None:
        """Called after each step. A run with callbacks waits for the device at each step."""

    def on_learning_rate(self, report: RateReport) -> float | None:
        """Called before each step. Return its learning rate, or None for report.lr."""

    def on_evaluation(self, report: EvaluationReport) -> bool | None:
        """Called after each evaluation: before the first step, after the last, and every eval_steps steps."""

    def on_save(self, report: SaveReport) -> bool | None:
        """Called after each checkpoint: every save_steps steps, and after the last step."""


_METHODS = [name for name in vars(Callback) if name.startswith("on_")]


class Callbacks:
    """The callbacks of a run: `Callback` objects, or functions of a StepReport. WgradError: one is neither."""

    def __init__(self, given: Iterable[Callback | Callable[[StepReport], Any]] = ()) -> None:
        if not isinstance(given, Iterable):
            raise WgradError(f"callbacks: must be a list of callbacks; got {short(given)}: put it into a list")
        self._callbacks = [_as_callback(one) for one in given]
        self._listeners: list[Callback] = []
        self.stop = False  # whether one has asked to end the run

    def listen(self, listener: Callback) -> None:
        """Add an internal callback, for which the run does not wait."""
        self._listeners.append(listener)

    def forget_listeners(self) -> None:
        """Remove the internal callbacks, before the run starts again."""
        self._listeners.clear()

    def again(self) -> Callbacks:
        """Return the same callbacks for another run."""
        return Callbacks(self._callbacks)

    def __bool__(self) -> bool:
        """Return whether there are callbacks that the run waits for."""
        return bool(self._callbacks)

    def step(self, report: StepReport) -> None:
        self._note([one.on_step(report) for one in self._all()])

    def rate(self, step: int, total_steps: int, lr: float) -> float:
        """Return the learning rate of a step. WgradError: a callback returned something else."""
        for one in self._callbacks:
            given = one.on_learning_rate(RateReport(step, total_steps, lr))
            if given is None:
                continue
            number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
            if not number or not 0 <= given <= sys.float_info.max:
                raise WgradError(
                    f"callbacks: {type(one).__name__}.on_learning_rate: must return a number, 0 or more, or None; got "
                    f"{short(given)} for step {step}"
                )
            lr = float(given)
        return lr

    def evaluation(self, report: EvaluationReport) -> None:
        self._note([one.on_evaluation(report) for one in self._all()])

    def save(self, report: SaveReport) -> None:
        self._note([one.on_save(report) for one in self._all()])

    def _all(self) -> list[Callback]:
        """Return all callbacks, the internal ones first, so that they are called even if another one raises."""
        return [*self._listeners, *self._callbacks]

    def _note(self, answers: list[bool | None]) -> None:
        self.stop = self.stop or any(isinstance(answer, (bool, np.bool_)) and bool(answer) for answer in answers)


class _StepFunction(Callback):
    def __init__(self, function: Callable[[StepReport], Any]) -> None:
        self._function = function

    def on_step(self, report: StepReport) -> bool | None:
        result: bool | None = self._function(report)
        return result


def _as_callback(given: Any) -> Callback:
    if isinstance(given, type):
        raise WgradError(
            f"callbacks: must be wgrad.Callback objects or functions of a step's report; got {short(given)}: call it, "
            "to make one"
        )
    told = [name for name in dir(given) if name.startswith("on_")]
    if isinstance(given, Callback):
        for name in told:
            _check_method(given, name)
        return given
    if told:
        raise WgradError(
            f"callbacks: {type(given).__name__} has {told[0]}, which only a wgrad.Callback is asked for: derive it "
            "from that"
        )
    if callable(given):
        _check_call(given, "a function of a step's report")
        return _StepFunction(given)
    raise WgradError(
        f"callbacks: must be wgrad.Callback objects or functions of a step's report; got {short(given)}: leave it out"
    )


def _check_method(given: Callback, name: str) -> None:
    """Raise WgradError for a method that a run never calls, or cannot call."""
    where = f"{type(given).__name__}.{name}"
    if name not in _METHODS:
        raise WgradError(
            f"callbacks: a run never calls {where}{did_you_mean(name, _METHODS)}: the methods are "
            f"{', '.join(_METHODS)}; give yours another name"
        )
    _check_call(getattr(given, name), where)


def _check_call(function: Any, what: str) -> None:
    """Raise WgradError if a function cannot be called with a report, or is asynchronous."""
    if not callable(function):
        raise WgradError(f"callbacks: {what} must be a function; got {function!r}: make it one")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise WgradError(f"callbacks: {what} is asynchronous, and a run awaits nothing: make it a plain function")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise WgradError(f"callbacks: {what} must take one argument, the report: change it") from None
    except ValueError:  # a function in C without a signature
        pass
