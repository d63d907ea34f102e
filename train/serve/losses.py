"""Losses of a server's device: when it is opened again, and when that is enough."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

from wgrad.device.errors import DeviceLost
from wgrad.train.model.model import Model
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

MOST = 3  # losses with no answer in between
MOST_OF_A_REQUEST = 2  # losses of the device within one: it may be what the device fails on

Reload = Callable[[int], Mapping[str, Model]]  # how often it was lost -> the models on the device, opened again


class Losses:
    """reload: None where the device cannot be opened again."""

    def __init__(self, reload: Reload | None) -> None:
        self._reload, self._all, self._in_a_row = reload, 0, 0

    def answered(self) -> None:
        """An answer has come to its end."""
        self._in_a_row = 0

    def recover(self, reason: str) -> Mapping[str, Model]:
        """Return the models, loaded again. The old ones must be gone but for the garbage collector. DeviceLost, with a
        report: it is lost too often, or does not open."""
        while True:
            self._all, self._in_a_row = self._all + 1, self._in_a_row + 1
            if self._reload is None:
                raise DeviceLost(f"{reason}. Start the server again")
            if self._in_a_row >= MOST:
                raise DeviceLost(
                    f"the device was lost {MOST} times with no answer in between: {reason}. Try a smaller --batch-size "
                    "or --context, another driver or another --device"
                )
            say(f"wgrad: the device was lost ({reason}): it is opened again", "stderr")
            gc.collect()
            try:
                return self._reload(self._all)
            except DeviceLost as error:
                reason = one_line(error)
