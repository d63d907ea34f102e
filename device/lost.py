"""Work that may lose the device."""

from __future__ import annotations

from collections.abc import Callable

from wgrad.device.errors import DeviceLost


def lost_in(work: Callable[[], object]) -> DeviceLost | None:
    """Do work. Return the error if the device was lost, without its traceback, which would keep arrays alive."""
    try:
        work()
    except DeviceLost as error:
        return type(error)(str(error))
    return None
