"""After the device was lost: what is said, when to give up, and the device opened anew.

Of several ranks each whose device was lost does this, and all go back to the newest state of the first.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

from wgrad.device.contract import Device
from wgrad.device.errors import DeviceLost
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.output.checkpoints import TrainingState
from wgrad.train.ranks.world import PeerLost, World

MOST = 3  # losses at one step


def lost_in(run: Callable[[], None]) -> DeviceLost | None:
    """Run to the end, or until the device is lost. -> the error without a traceback, which would refer to its arrays"""
    try:
        run()
    except DeviceLost as error:
        return type(error)(str(error))
    return None


class Losses:
    """The losses of a run, by the number of steps that were done. Of several ranks, those of this one's device."""

    def __init__(self, config: FinetuneConfig, world: World) -> None:
        self._config, self._world = config, world
        self._by_step: Counter[int] = Counter()

    def reopened(
        self, device: Device, lost: DeviceLost, step: int, state: TrainingState | None, say: Callable[[str], None]
    ) -> Device:
        """Open the device of a run anew, whose arrays are all gone but for what waits for the garbage collector.

        Of several ranks the one that gives up leaves the others, where they can go on without it.

        Args:
            lost: how. Where it was the device of another rank, this one is as it was.
            step: that was under way.
            state: that the run goes on from.
            say: prints a line for people.

        Raises:
            DeviceLost: with a report, because it does not open, or this step has had enough of losses.
        """
        gc.collect()
        if isinstance(lost, PeerLost):
            return device
        try:
            resume = "no checkpoint was saved" if state is None else f"--resume goes on after step {state.step}"
            self._add(device, lost, step, resume)
            device = device.reopen(self._by_step.total())
        except DeviceLost as error:
            self._world.leave(error)
            raise
        say(f"device: {device.description}, opened again")
        return device

    def _add(self, device: Device, lost: DeviceLost, step: int, resume: str) -> None:
        self._by_step[step] += 1
        if not device.reopens:
            raise type(lost)(f"{lost}: {resume}")
        if self._by_step[step] >= MOST:
            smaller = "--batch-size or --max-length" if self._config.batch_size > 1 else "--max-length"
            raise DeviceLost(
                f"the device was lost {MOST} times at step {step}: {lost}. Try a smaller {smaller}, another driver "
                f"or another --device; {resume}"
            )
