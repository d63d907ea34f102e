"""Callbacks of a run, each with a frozen dataclass; the answer can end the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.options.option_names import did_you_mean


@dataclass(frozen=True)
class StepReport:
    """An optimiser step that the device has finished. loss: mean nats a target token; grad_norm: before clipping, None
    where it was not finite and the step was skipped; tokens: of the step; tokens_per_second: of late; metrics: what
    else metrics.jsonl has of it."""

    step: int  # 1 for the first
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
    """Held-out loss after `step` steps, 0 before the first. loss: mean nats per held-out token, None where
    nothing is; texts: what follows each prompt, None where the model has no numbers to choose it by; metrics: of
    another objective than sft."""

    step: int
    loss: float | None
    texts: tuple[str | None, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that is whole. folder: where, with the adapter in PEFT's format (not with full=True)."""

    step: int
    folder: Path


@dataclass(frozen=True)
class RateReport:
    """A step that is about to begin. lr: learning rate by the schedule, or by the callback before this one."""

    step: int  # 1 for the first
    total_steps: int
    lr: float


class Callback:
    """Override what is of interest. A method that returns True ends the run after the step that it tells of (from an
    evaluation before training: after the first), as if it were the last: the result is written and measured. An
    exception ends it there and then, and reaches the caller; the checkpoints stay for resume=True."""

    def on_step(self, report: StepReport) -> bool | None:
        """A step is done. The run waits for the device at each step where there are callbacks."""

    def on_learning_rate(self, report: RateReport) -> float | None:
        """A step is about to begin: return the learning rate that it is to have, or None for report.lr."""

    def on_evaluation(self, report: EvaluationReport) -> bool | None:
        """Something was measured: before the first step, after the last, and each eval_every steps."""

    def on_save(self, report: SaveReport) -> bool | None:
        """A checkpoint was written: each save_every steps, and after the last."""


_METHODS = [name for name in vars(Callback) if name.startswith("on_")]


class Callbacks:
    """Those of a run. A function that takes a StepReport is one too. WgradError for what is neither."""

    def __init__(self, given: Iterable[Callback | Callable[[StepReport], Any]] = ()) -> None:
        if not isinstance(given, Iterable):
            raise WgradError(f"callbacks: must be a list of callbacks; got {given!r}: put it into a list")
        self._callbacks = [_as_callback(one) for one in given]
        self._listeners: list[Callback] = []
        self.stop = False  # one has asked for the end

    def listen(self, listener: Callback) -> None:
        """One more, for which the run does not wait."""
        self._listeners.append(listener)

    def forget_listeners(self) -> None:
        """The run begins anew, with others."""
        self._listeners.clear()

    def again(self) -> Callbacks:
        """Return the same ones, for another run."""
        return Callbacks(self._callbacks)

    def __bool__(self) -> bool:
        """Return whether there is one that the run waits for."""
        return bool(self._callbacks)

    def step(self, report: StepReport) -> None:
        self._note([one.on_step(report) for one in self._all()])

    def rate(self, step: int, total_steps: int, lr: float) -> float:
        """Return the learning rate of a step. Raises WgradError: a callback's is no rate."""
        for one in self._callbacks:
            given = one.on_learning_rate(RateReport(step, total_steps, lr))
            if given is None:
                continue
            number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
            if not number or not 0 <= float(given) < math.inf:
                raise WgradError(
                    f"callbacks: {type(one).__name__}.on_learning_rate: must return a number, 0 or more, or None; got "
                    f"{given!r} for step {step}"
                )
            lr = float(given)
        return lr

    def evaluation(self, report: EvaluationReport) -> None:
        self._note([one.on_evaluation(report) for one in self._all()])

    def save(self, report: SaveReport) -> None:
        self._note([one.on_save(report) for one in self._all()])

    def _all(self) -> list[Callback]:
        """Listeners first: what they are told is told also where a callback raises."""
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
            f"callbacks: must be wgrad.Callback objects or functions of a step's report; got {given!r}: call it, to "
            "make one"
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
        f"callbacks: must be wgrad.Callback objects or functions of a step's report; got {given!r}: leave it out"
    )


def _check_method(given: Callback, name: str) -> None:
    """WgradError for a method that a run would never call, or could not."""
    where = f"{type(given).__name__}.{name}"
    if name not in _METHODS:
        raise WgradError(
            f"callbacks: a run never calls {where}{did_you_mean(name, _METHODS)}: the methods are "
            f"{', '.join(_METHODS)}; give yours another name"
        )
    _check_call(getattr(given, name), where)


def _check_call(function: Any, what: str) -> None:
    """WgradError where this cannot be called with a report, or its answer would come too late."""
    if not callable(function):
        raise WgradError(f"callbacks: {what} must be a function; got {function!r}: make it one")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise WgradError(f"callbacks: {what} is asynchronous, and a run awaits nothing: make it a plain function")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise WgradError(f"callbacks: {what} must take one argument, the report: change it") from None
    except ValueError:  # of a function in C, whose arguments nobody knows
        pass
