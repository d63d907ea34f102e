"""After the device was lost: what is said, when to give up, and the device opened anew.

Of several ranks each whose device was lost does this, and all go back to the newest state of the first. Where a process
cannot have a device again (HIP), the command is started again.
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

MOST = 3  # losses at one step
_LOST_AT = "WGRAD_LOST_AT"  # saved steps at which processes before this one have lost the device: "0,8,8"
_PAUSE = 5.0  # seconds before a new process opens a GPU: a driver that resets one takes a while


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
            self._add(device, lost, step, None if state is None else state.step)
            device = device.reopen(self._by_step.total())
        except NeedsNewProcess as error:
            if LAUNCHER not in os.environ:  # which starts all ranks again
                self._world.leave(error)
            raise
        except DeviceLost as error:
            self._world.leave(error)
            raise
        say(f"device: {device.description}, opened again")
        return device

    def _add(self, device: Device, lost: DeviceLost, step: int, saved: int | None) -> None:
        resume = "no checkpoint was saved" if saved is None else f"--resume goes on after step {saved}"
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


def _lost_at() -> list[str]:
    return os.environ.get(_LOST_AT, "").split(",")


def words_to_resume(words: Sequence[str], step: int, option: str = "--resume") -> list[str]:
    """Return the words of a command that goes on from the step that is saved. New processes count the loss.

    DeviceLost: they were started often enough. A run ends itself, unless it counts from a step before this one, as its
    newest checkpoint is damaged.
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
    """A block that calls `words_to_resume`, and leaves no count to later runs of this process."""
    before = os.environ.get(_LOST_AT)
    try:
        yield
    finally:
        os.environ.pop(_LOST_AT, None)
        if before is not None:
            os.environ[_LOST_AT] = before


def start_again(words: Sequence[str]) -> None:
    """Replace this process by one that runs `wgrad` with these words. It returns where the system cannot."""
    if os.name == "posix":
        os.execv(sys.executable, [sys.executable, "-m", "wgrad", *words])
