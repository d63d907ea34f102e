"""Modes of operators on Tensors: on the tape or not, in a stretch that is recomputed, in a step that is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wgrad.device.errors import WgradError


class _Mode(threading.local):
    recording = True
    recomputing = False
    step = ""  # the name of a step that is being recorded (compiled_step.py)


_mode = _Mode()


def is_recording() -> bool:
    """Return whether operators put themselves on the tape (False inside `no_grad`)."""
    return _mode.recording


@contextmanager
def recording(on: bool) -> Iterator[None]:
    previous, _mode.recording = _mode.recording, on
    try:
        yield
    finally:
        _mode.recording = previous


def is_recomputing() -> bool:
    """Return whether a stretch is recomputed for its backward, which comes next: what it saves lives shortly, and
    nobody reads its output."""
    return _mode.recomputing


@contextmanager
def recomputing() -> Iterator[None]:
    previous, _mode.recomputing = _mode.recomputing, True
    try:
        with recording(True):
            yield
    finally:
        _mode.recomputing = previous


def no_grad() -> Any:
    """A context in which operators save nothing for a backward, and parameters may be changed in place."""
    return recording(False)


@contextmanager
def recording_step(name: str) -> Iterator[None]:
    """Inside, nothing may be copied between the host and a device."""
    _mode.step = name
    try:
        yield
    finally:
        _mode.step = ""


def in_step() -> bool:
    """Return whether a step is being recorded, in which nothing can be read."""
    return bool(_mode.step)


def refuse_in_step(what: str) -> None:
    if _mode.step:
        raise WgradError(
            f"compile: {_mode.step} {what}, which a recorded step cannot repeat; pass it as an argument or return it"
        )
