"""Choosing the number of steps of a block, so that text flows and the host keeps up."""

from __future__ import annotations

import time

from wgrad.train.inference.batch_step import MOST_STEPS

BLOCK_SECONDS = 0.02  # duration of a block: text flows, and a new request waits for at most two
_BUSY, _MOST_FOR_HOST = 0.2, 16  # share of a block that the host should wait; most steps of a block to achieve this
_KEPT = 0.75  # weight of earlier measurements, from one block to the next


class Pace:
    """The pace of a server. steps: of the next block."""

    def __init__(self) -> None:
        self._given = 0.0  # time at which texts were last sent
        self.pause()

    def pause(self) -> None:
        """Begin again with short blocks after a pause, so that others soon join the first request."""
        self.steps, self._least, self._last_read = 1, 1, 0.0  # _last_read: time at which the last block was read
        self._took = self._waited = self._done = 0.0  # seconds and steps of the last blocks

    def gives(self, single: bool) -> bool:
        """Return whether to send texts after a block. single: blocks have a single step; texts are then sent as often
        as with longer blocks, since each event costs time of the web's thread."""
        now = time.monotonic()
        if single and now - self._given < BLOCK_SECONDS:
            return False
        self._given = now
        return True

    def read(self, steps: int, waited: float) -> None:
        """Choose the length of the next block from the time of the last ones. waited: the host's wait for the device.

        If the host hardly waited, its own work per block is the bottleneck, and blocks get longer, within limits.
        Several blocks count, since a block that was ready when the host came late seems to have taken no time.
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
