"""Calls into a driver that may never return."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from wgrad.device.errors import DeviceError

T = TypeVar("T")
TIMEOUT = "WGRAD_DEVICE_TIMEOUT"  # seconds, replacing every default
LOOK = 1.0  # seconds between two checks of a call


def timeout(default: float) -> float:
    """Return the seconds in $WGRAD_DEVICE_TIMEOUT, or the default. Raises DeviceError if it is not a number."""
    text = os.environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise DeviceError(f"{TIMEOUT}: must be seconds, above 0; got {text!r}: correct or unset it")
    return seconds


def bounded(work: Callable[[], T], seconds: float, late: Callable[[], Exception]) -> T:
    """Run `work` in its own thread and return its result; raise `late()` if it takes longer than `seconds`."""
    result: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="wgrad-driver", daemon=True).start()
    # Checks are counted instead of the clock's seconds, since this process may be suspended for a while.
    look = min(LOOK, seconds)
    for _ in range(math.ceil(seconds / look)):
        if done.wait(look):
            break
    else:
        raise late()
    if failed:
        raise failed[0]
    return result[0]
