"""After the device was lost: what is said, when to give up, and the device opened anew."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

from wgrad.device.contract import Device
from wgrad.device.errors import DeviceLost
from wgrad.train.options.finetune_config import FinetuneConfig

MOST = 3  # losses at one step
_GO_ON = "Start again with --resume to go on from the last checkpoint"


def lost_in(run: Callable[[], None], reopens: bool) -> DeviceLost | None:
    """Run to the end, or until the device is lost. -> the error without a traceback, which would refer to its arrays.

    reopens: whether the run can go on; else the error is raised.
    """
    try:
        run()
    except DeviceLost as error:
        if not reopens:
            raise type(error)(f"{error}. {_GO_ON}") from error
        return type(error)(str(error))
    return None


class Losses:
    """The losses of a run, by the number of steps that were done."""

    def __init__(self, config: FinetuneConfig) -> None:
        self._config = config
        self._by_step: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._by_step.total()

    def add(self, error: DeviceLost, step: int, saved: int | None) -> None:
        """Count one. DeviceLost, with a report, where this step has had enough of them.

        saved: the step of the newest checkpoint.
        """
        self._by_step[step] += 1
        if self._by_step[step] >= MOST:
            resume = "no checkpoint was saved" if saved is None else f"--resume goes on after step {saved}"
            smaller = "--batch-size or --max-length" if self._config.batch_size > 1 else "--max-length"
            raise DeviceLost(
                f"the device was lost {MOST} times at step {step}: {error}. Try a smaller {smaller}, another driver "
                f"or another --device; {resume}"
            )


def reopened(device: Device, losses: int, say: Callable[[str], None]) -> Device:
    """Open the device of a run anew, whose arrays are all gone but for what waits for the garbage collector."""
    gc.collect()
    device = device.reopen(losses)
    say(f"device: {device.description}, opened again")
    return device
