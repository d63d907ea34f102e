"""Length of a block of steps: text flows, and the host keeps up."""

from __future__ import annotations

import time

from wgrad.train.inference.batch_step import MOST_STEPS

BLOCK_SECONDS = 0.02  # of a block of steps: text flows, and who comes waits no longer than two
_BUSY, _MOST_FOR_HOST = 0.2, 16  # part of a block that the host waits at least; steps of a block so that it does
_KEPT = 0.75  # of what was measured, from one block to the next


class Pace:
    """steps: of the next block."""

    def __init__(self) -> None:
        self._given = 0.0  # when texts were given out last
        self.pause()

    def pause(self) -> None:
        """Nothing is generated: whoever comes first begins with short blocks, so that others soon join."""
        self.steps, self._least, self._last_read = 1, 1, 0.0  # when the last block was read
        self._took = self._waited = self._done = 0.0  # seconds and steps of the last blocks

    def gives(self, single: bool) -> bool:
        """Return whether texts are given out after a block: where blocks have a single step each, as often as if they
        were longer. An event takes the web's thread its time."""
        now = time.monotonic()
        if single and now - self._given < BLOCK_SECONDS:
            return False
        self._given = now
        return True

    def read(self, steps: int, waited: float) -> None:
        """Choose the length of a block by how long the last ones took, of which the host `waited` for the device.

        Where it hardly waited its own work for each block is what takes long: blocks must be longer then, within
        limits. Several blocks count: one that was ready when the host came late seems to have taken no time.
        """
        now = time.monotonic()
        if self._last_read:
            self._took = _KEPT * self._took + max(now - self._last_read, 1e-6)
            self._waited, self._done = _KEPT * self._waited + waited, _KEPT * self._done + steps
            if self._waited < _BUSY * self._took:
                self._least = min(2 * steps, _MOST_FOR_HOST)
            elif self._waited > 0.5 * self._took:
                self._least = max(self._least * 3 // 4, 1)
            wanted = max(int(BLOCK_SECONDS / (self._took / self._done)), self._least)
            self.steps = max(min(wanted, 2 * self.steps, MOST_STEPS), 1)
        self._last_read = now
