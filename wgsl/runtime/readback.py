"""Device-to-host copies that overlap with work submitted later."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.runtime import submission_queue


class Readback:
    """A copy of an array on its way to the host, as of the call of `readback`."""

    def __init__(self, readback: submission_queue.Readback, array: Array, out: np.ndarray | None) -> None:
        self._readback, self._shape, self._dtype, self._out = readback, array.shape, array.dtype, out

    def ready(self) -> bool:
        """Return whether `result` would not wait."""
        return self._readback.ready()

    def result(self) -> np.ndarray:
        """Wait for the array. May be called once."""
        out = np.empty(self._shape, self._dtype) if self._out is None else self._out
        self._readback.copy_to(out.reshape(-1).view(np.uint8).data)
        return out
