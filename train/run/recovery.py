"""Recovery after the device was lost: reopen it, or give up.

With several ranks, each one whose device was lost reopens it, and all return to the newest state of the first rank.
Where a process cannot open a device twice (HIP), the command is started again.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from wgrad.device.contract import Device
from wgrad.device.errors import DeviceLost, NeedsNewProcess
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.output.checkpoints import TrainingState
from wgrad.train.ranks.start import LAUNCHER
from wgrad.train.ranks.world import PeerLost, World

MOST = 3  # losses at one step before a run gives up
_LOST_AT = "WGRAD_LOST_AT"  # saved steps after which earlier processes lost the device: "0,8,8"
_PAUSE = 5.0  # seconds before a new process opens a GPU: its driver needs a while to reset it


class Losses:
    """Counts how often a run lost its device at each step. Each rank counts its own."""

    def __init__(self, config: FinetuneConfig, world: World) -> None:
        self._config, self._world = config, world
        self._by_step: Counter[int] = Counter()

    def reopened(
        self, device: Device, lost: DeviceLost, step: int, state: TrainingState | None, say: Callable[[str], None]
    ) -> Device:
        """Reopen the device of a run. The caller has dropped all its arrays.

        A rank that gives up leaves the others, if they can continue without it.

        Args:
            device: Device that was lost, or is intact if `lost` says that another rank's was.
            lost: The error.
            step: Step that was running.
            state: State that the run continues from.
            say: Prints a line for people.

        Raises:
            DeviceLost: The device does not open, or was lost too often at this step.
            NeedsNewProcess: Only a new process can open it.
        """
        gc.collect()
        if isinstance(lost, PeerLost):
            return device
        try:
            saved = None if state is None else state.step
            self._add(device, lost, step, saved)
            device = self._open(device, saved)
        except NeedsNewProcess as error:
            if LAUNCHER not in os.environ:  # which starts all ranks again
                self._world.leave(error)
            raise
        except DeviceLost as error:
            self._world.leave(error)
            raise
        say(f"device: {device.description}, opened again")
        return device

    def _open(self, device: Device, saved: int | None) -> Device:
        try:
            opened: Device = device.reopen(self._by_step.total())
            return opened
        except DeviceLost as error:
            raise DeviceLost(f"{error}; {_resume(saved)}") from error

    def _add(self, device: Device, lost: DeviceLost, step: int, saved: int | None) -> None:
        resume = _resume(saved)
        self._by_step[step] += 1
        count = self._by_step[step]
        if device.needs_new_process:
            count, step = _lost_at().count(str(saved or 0)) + 1, saved or 0
        if count < MOST and device.needs_new_process and not self._config.lr_sweep:
            raise NeedsNewProcess(f"{lost}; {resume}", step)
        if count < MOST and not device.reopens:
            raise type(lost)(f"{lost}; {resume}")
        if count >= MOST:
            smaller = "--batch-size or --max-length" if self._config.batch_size > 1 else "--max-length"
            raise DeviceLost(
                f"the device was lost {MOST} times at step {step}: {lost}. Try a smaller {smaller}, another driver "
                f"or another --device; {resume}"
            )


def _resume(saved: int | None) -> str:
    return "no checkpoint was saved" if saved is None else f"--resume goes on after step {saved}"


def _lost_at() -> list[str]:
    return os.environ.get(_LOST_AT, "").split(",")


def words_to_resume(words: Sequence[str], step: int, option: str = "--resume") -> list[str]:
    """Return the command line that continues from the last saved step, and count the loss for the new process.

    Raises:
        DeviceLost: The device was lost too often since that step. A run counts this itself, except when its newest
            checkpoint is damaged and it therefore counts from an earlier step.
    """
    losses = [*filter(None, _lost_at()), str(step)]
    if losses.count(str(step)) >= MOST:
        raise DeviceLost(
            f"the device was lost {MOST} times since step {step} was saved, and no later one was: see above what was "
            "lost, and try another driver or another --device"
        )
    os.environ[_LOST_AT] = ",".join(losses)
    time.sleep(_PAUSE)
    return [*words, option] if option and option not in words else list(words)


@contextmanager
def counting_losses() -> Iterator[None]:
    """Restore the count of `words_to_resume` after the block, for later runs of this process."""
    before = os.environ.get(_LOST_AT)
    try:
        yield
    finally:
        os.environ.pop(_LOST_AT, None)
        if before is not None:
            os.environ[_LOST_AT] = before


def start_again(words: Sequence[str]) -> None:
    """Replace this process by one that runs `wgrad` with these words. Does nothing where the system cannot."""
    if os.name == "posix":
        os.execv(sys.executable, [sys.executable, "-m", "wgrad", *words])
