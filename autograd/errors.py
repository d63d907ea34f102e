"""What can go wrong for a reason that a user can act on. The command line prints these and exits with status 2."""

from __future__ import annotations

import importlib


class WgradError(Exception):
    """A user's mistake or a limit of the machine. The message is one complete line: what, the rule, what to do."""


class UnusableResult(WgradError):
    """What a run came to is of no use: not finite, or nothing was learnt. The command's status is 1."""


class ShapeError(WgradError, ValueError):
    """An operator was given an argument of the wrong shape, dtype or value."""


class DeviceUnavailable(WgradError):
    """A device that was asked for by name cannot be used here."""


def _of_each_device(name: str) -> tuple[type[BaseException], ...]:
    """A class of each device's own errors. A room that is not installed raises none."""
    found: list[type[BaseException]] = []
    for room in ("wgsl", "hip"):
        try:
            found.append(getattr(importlib.import_module(f"wgrad.{room}.errors"), name))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("wgrad."):
                raise
    return tuple(found)


# For `except DEVICE_ERRORS`: lost device, out of memory, no driver. The rooms below `autograd` cannot import
# WgradError (imports never point upwards), so their classes are collected here.
DEVICE_ERRORS = _of_each_device("DeviceError")
OUT_OF_MEMORY = _of_each_device("OutOfMemory")
