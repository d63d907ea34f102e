"""Length of a block of steps: text flows, and the host keeps up."""

from __future__ import annotations

import time

from wgrad.train.inference.batch_step import MOST_STEPS

BLOCK_SECONDS = 0.02  # of a block of steps: text flows, and who comes waits no longer than two
_BUSY, _MOST_FOR_HOST = 0.2, 16  # part of a block that the host waits at least; steps of a block so that it does


class Pace:
    """steps: of the next block."""

    def __init__(self) -> None:
        self.steps, self._least, self._last_read = 1, 1, 0.0  # when the last one was read

    def pause(self) -> None:
        """Leave the time up to the next block out."""
        self._last_read = 0.0

    def read(self, steps: int, waited: float) -> None:
        """Choose the length of a block by how long the last one took, of which the host `waited` for the device.

        Where it hardly waited its own work for each block is what takes long: blocks must be longer then, within
        limits.
        """
        now = time.monotonic()
        if self._last_read:
            took = max(now - self._last_read, 1e-6)
            if waited < _BUSY * took:
                self._least = min(2 * steps, _MOST_FOR_HOST)
            elif waited > 0.5 * took:
                self._least = max(self._least - 1, 1)
            wanted = max(int(BLOCK_SECONDS / (took / steps)), self._least)
            self.steps = max(min(wanted, 2 * self.steps, MOST_STEPS), 1)
        self._last_read = now
