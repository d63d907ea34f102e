"""Losses of a server's device: reopening it, and giving up after too many."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

from wgrad.device.errors import DeviceLost
from wgrad.train.model.model import Model
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

MOST = 3  # losses with no answer in between
MOST_OF_A_REQUEST = 2  # losses within one request, which may be their cause

Reload = Callable[[int], Mapping[str, Model]]  # from the number of losses to the models on the reopened device


class Losses:
    """The losses of a device so far. reload: None if it cannot be opened again."""

    def __init__(self, reload: Reload | None) -> None:
        self._reload, self._all, self._in_a_row = reload, 0, 0

    def loaded(self, load: Callable[[], Mapping[str, Model]]) -> Mapping[str, Model]:
        """Load the models for the first time. Raises DeviceLost as `recover` does."""
        try:
            return load()
        except DeviceLost as error:
            reason = one_line(error)
        return self.recover(reason)

    def answered(self) -> None:
        """Note that an answer was completed."""
        self._in_a_row = 0

    def recover(self, reason: str) -> Mapping[str, Model]:
        """Reload the models. The caller must have dropped the old ones.

        Raises:
            DeviceLost: the device was lost too often, or does not open; with a report.
        """
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
