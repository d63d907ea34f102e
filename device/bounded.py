"""Calls into a driver that may never come back."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from wgrad.device.errors import DeviceError

T = TypeVar("T")
TIMEOUT = "WGRAD_DEVICE_TIMEOUT"  # seconds, in place of every default
LOOK = 1.0  # seconds between two looks at what a call has come to


def timeout(default: float) -> float:
    """Return the seconds that $WGRAD_DEVICE_TIMEOUT says. DeviceError: it says none."""
    text = os.environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise DeviceError(f"{TIMEOUT}: must be seconds, above 0; got {text!r}: correct or unset it")
    return seconds


def bounded(work: Callable[[], T], seconds: float, late: Callable[[], Exception]) -> T:
    """Return the result of `work`, which is done by a thread of its own; raise `late()` where that takes longer."""
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
    # Looks are counted, not the clock's seconds: this process may be stopped for a while.
    look = min(LOOK, seconds)
    for _ in range(math.ceil(seconds / look)):
        if done.wait(look):
            break
    else:
        raise late()
    if failed:
        raise failed[0]
    return result[0]
