"""--sync-every H: each rank takes H AdamW steps on its own share of the data, then all move along the mean of where
that led them, by an outer step of SGD with Nesterov momentum.

What travels is one array of the size of the parameters in H steps. The moments of AdamW stay with their rank; at a
checkpoint all ranks take their mean, so that a run which is resumed from it goes on as the one that was not.
Source: DiLoCo (arXiv 2311.08105), whose outer rate and momentum these are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgrad.train.ranks.world import RanksLost, World
from wgrad.train.step.optim import AdamW

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
MOMENTUM = "outer_momentum"  # its name in a checkpoint


class DiLoCo:
    """The outer optimiser. targets: target tokens of this rank since the last outer step, by which it is weighed."""

    def __init__(self, world: World, optimizer: AdamW) -> None:
        self.world, self.optimizer, self._device = world, optimizer, optimizer.device
        self._momentum = np.zeros(optimizer.parameters.size, np.float32)
        self._anchor = np.zeros(0, np.float32)
        self.targets = 0

    def begin(self) -> None:
        """The parameters are what they are to be before the first step."""
        self._anchor = self._device.download(self.optimizer.parameters.data)

    def outer_step(self, asked: int | None) -> int | None:
        """Bring all ranks to the same parameters. asked: the signal that asked this rank to end -> that asked any."""
        parameters, size = self.optimizer.parameters, self._anchor.size
        local = self._device.download(parameters.data)

        def values() -> np.ndarray:
            asked_of = np.zeros(self.world.size)
            asked_of[self.world.rank] = asked or 0
            return np.concatenate([(self._anchor - local) * np.float64(self.targets), [self.targets], asked_of])

        # Of ranks that are lost their steps since the last time are lost: the others take the mean of theirs.
        total = self._total(values)
        difference = (total[:size] / max(total[size], 1)).astype(np.float32)
        self._momentum = np.float32(OUTER_MOMENTUM) * self._momentum + difference
        self._anchor = self._anchor - np.float32(OUTER_LR) * (difference + np.float32(OUTER_MOMENTUM) * self._momentum)
        self._device.write(parameters.data, self._anchor)
        self.targets = 0
        return int(total[size + 1 :].max()) or None

    def _total(self, values: Callable[[], np.ndarray]) -> np.ndarray:
        while True:
            total = values()
            try:
                self.world.attempt(lambda: self.world.all_reduce(total, "the parameters", patient=True))  # noqa: B023
                return total
            except RanksLost:
                continue

    def share_moments(self) -> None:
        """Before a checkpoint, after an outer step: all ranks take the mean of their moments, and the counts and loss
        scale of the first."""
        optimizer = self.optimizer
        for array in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.state, optimizer.loss_scale):
            mine = self._device.download(array).astype(np.float64)
            everywhere = array is optimizer.exp_avg or array is optimizer.exp_avg_sq
            total = self._total(
                lambda: mine.copy() if everywhere or self.world.is_main_process else np.zeros_like(mine)  # noqa: B023
            )  # noqa: B023
            self._device.write(array, (total / (self.world.size if everywhere else 1)).astype(np.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        """State for a checkpoint, besides the parameters."""
        return {MOMENTUM: self.optimizer.parameters.to_file(self._momentum)}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of `arrays`; a checkpoint of a run that synchronised every step has none."""
        if MOMENTUM in arrays:
            self._momentum = self.optimizer.parameters.from_file(arrays[MOMENTUM])
