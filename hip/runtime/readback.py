"""Asynchronous copies to the host: pinned memory that the stream copies into, and an event at the end of the copy."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array, size_class
from wgrad.hip.runtime.binding import NOT_READY, check, wait_for_event
from wgrad.hip.runtime.launch import TO_HOST

_MOST_KEPT = 8  # pinned buffers kept for the next copy


class Pinned:
    """Pinned host memory, with the event of the last copy into it."""

    def __init__(self, hip: Any, nbytes: int) -> None:
        self._hip, self.nbytes = hip, nbytes
        self.event = check(hip.hipEventCreate(), "hipEventCreate")
        self.address = int(check(hip.hipHostMalloc(nbytes, 0), f"{nbytes:,} bytes of pinned host memory"))

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _ending():  # the driver's library may be gone before this
            return
        if hasattr(self, "address"):
            self._hip.hipHostFree(self.address)
        if hasattr(self, "event"):
            self._hip.hipEventDestroy(self.event)


class Readback:
    """An asynchronous copy of an array to the host, with the values at the time of `readback`."""

    def __init__(
        self, owner: Readbacks, pinned: Pinned, array: Array, out: np.ndarray | None, what: Callable[[], str]
    ) -> None:
        self._owner, self._out, self._what = owner, out, what
        self._pinned: Pinned | None = pinned
        self._shape, self._dtype, self._nbytes = array.shape, array.dtype, array.nbytes

    def ready(self) -> bool:
        """Return whether `result` would return without waiting."""
        if self._pinned is None:
            return True
        code = self._owner.hip.hipEventQuery(self._pinned.event)
        if int(code[0]) == NOT_READY:
            return False
        check(code, self._what)
        return True

    def result(self) -> np.ndarray:
        """Wait for the array. May be called once."""
        if self._pinned is None:
            raise DeviceError("result() of a download was called twice: keep the array that it gave")
        wait_for_event(self._owner.hip, self._pinned.event, self._what)
        pinned, self._pinned = self._pinned, None
        out = np.empty(self._shape, self._dtype) if self._out is None else self._out
        if self._nbytes:
            ctypes.memmove(out.ctypes.data, pinned.address, self._nbytes)
        self._owner.free(pinned)
        return out

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Never asked for: the copy may still be in flight, and the memory must outlive it.
        if getattr(self, "_pinned", None) is not None and not _ending():
            self._owner.hip.hipEventSynchronize(self._pinned.event)  # type: ignore[union-attr]


class Readbacks:
    """Starts copies from the device on its stream, and reuses the pinned memory of finished ones."""

    def __init__(self, hip: Any, stream: Any) -> None:
        self.hip, self._stream = hip, stream
        self._free: list[Pinned] = []

    def start(self, array: Array, out: np.ndarray | None, what: Callable[[], str]) -> Readback:
        """Start a copy. out: the destination, or None. what: returns the action, for an error's message."""
        pinned = self._take(max(array.nbytes, 1))
        if array.nbytes:
            kind = self.hip.hipMemcpyKind(TO_HOST)
            check(self.hip.hipMemcpyAsync(pinned.address, array.address, array.nbytes, kind, self._stream), what)
        check(self.hip.hipEventRecord(pinned.event, self._stream), what)
        return Readback(self, pinned, array, out, what)

    def free(self, pinned: Pinned) -> None:
        if len(self._free) < _MOST_KEPT:
            self._free.append(pinned)

    def _take(self, nbytes: int) -> Pinned:
        wanted = size_class(nbytes)
        for at, pinned in enumerate(self._free):
            if wanted <= pinned.nbytes <= 2 * wanted:
                return self._free.pop(at)
        return Pinned(self.hip, wanted)
