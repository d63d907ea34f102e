"""Modes of operators on Tensors: recording on the tape, recomputing a checkpointed part, recording a compiled step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wgrad.device.errors import WgradError


class _Mode(threading.local):
    recording = True
    recomputing = False
    step = ""  # name of the compiled step that is being recorded (compiled_step.py)
    rehearsed = False  # whether that step only runs to be recorded at its next call
    replayed = ""  # name of a caller's function whose work a run records and replays


_mode = _Mode()


def is_recording() -> bool:
    """Return whether operators are recorded on the tape (False inside `no_grad`)."""
    return _mode.recording


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Switch recording on the tape on or off in the block."""
    previous, _mode.recording = _mode.recording, on
    try:
        yield
    finally:
        _mode.recording = previous


def is_recomputing() -> bool:
    """Return whether a checkpointed part is recomputed for its backward, which follows at once.

    Saved arrays then live only briefly, and the output is not read.
    """
    return _mode.recomputing


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark the block as a recomputation, and record it on the tape."""
    previous, _mode.recomputing = _mode.recomputing, True
    try:
        with recording(True):
            yield
    finally:
        _mode.recomputing = previous


def no_grad() -> Any:
    """Return a context in which operators save nothing for a backward, and parameters may be changed in place."""
    return recording(False)


@contextmanager
def recording_step(name: str, rehearsed: bool) -> Iterator[None]:
    """Mark the block as recorded for a compiled step, in which nothing may be copied between host and device.

    rehearsed: It is the call before, which is not recorded.
    """
    _mode.step, _mode.rehearsed = name, rehearsed
    try:
        yield
    finally:
        _mode.step, _mode.rehearsed = "", False


@contextmanager
def without_reading(name: str) -> Iterator[None]:
    """Mark the block as a caller's function whose work is recorded and replayed, in which values cannot be read."""
    previous, _mode.replayed = _mode.replayed, name
    try:
        yield
    finally:
        _mode.replayed = previous


def is_readable() -> bool:
    """Return whether values can be read."""
    return not _mode.step and not _mode.replayed


def refuse_reading() -> None:
    """Raise WgradError where values cannot be read."""
    refuse_in_step("reads values")
    if _mode.replayed:
        raise WgradError(
            f"{_mode.replayed}: reads values (item, numpy), which stay the same when the run replays its work; compute "
            "with Tensors, with detach() for numbers"
        )


def refuse_in_step(what: str, in_rehearsal: bool = True) -> None:
    """Raise WgradError while a compiled step is recorded, or rehearsed.

    what: the forbidden operation, such as "reads values".
    """
    if _mode.step and (in_rehearsal or not _mode.rehearsed):
        raise WgradError(
            f"compile: {_mode.step} {what}, which a recorded step cannot repeat; pass it as an argument or return it"
        )
