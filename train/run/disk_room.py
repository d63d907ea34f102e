"""Disk space for a run's checkpoints and result, checked before the run begins."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.errors import WgradError
from wgrad.device.files import free_bytes
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.options.option_text import size
from wgrad.train.output.checkpoints import KEEP, Checkpoints

_STATES = 3  # float32 numbers per trained parameter: its value and two moments


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run adds to its folder: with its first checkpoint (`first`), and at most (`most`)."""

    first: int
    most: int


def disk_need(config: FinetuneConfig, trained: int, steps: int, there: int = 0) -> DiskNeed:
    """Return the disk space that a run needs in addition to its existing checkpoints.

    Args:
        config: Options of the run.
        trained: Number of trained parameters.
        steps: Remaining steps.
        there: Number of existing checkpoints.
    """
    result = 4 * trained
    checkpoint = _STATES * 4 * trained + (0 if config.full else result)
    saves = -(-steps // config.save_steps) if config.save_steps else 1
    # A new checkpoint is complete before the oldest is deleted.
    kept = min(there + saves, KEEP + 1 + config.best_kept)
    return DiskNeed(checkpoint, max(kept - there, 1) * checkpoint + result)


def check_disk(config: FinetuneConfig, trained: int, steps: int) -> str:
    """Compare the disk space that a run needs with what is free.

    Returns:
        A warning if the run may fill the disk, else "".

    Raises:
        WgradError: Not even the first checkpoint fits.
    """
    if config.lr_sweep or (free := free_bytes(config.out)) is None:
        return ""
    need = disk_need(config, trained, steps, len(Checkpoints(config.out).steps()))
    if free < need.first:
        raise WgradError(
            f"--out: a checkpoint in {config.out} takes about {size(need.first)}, and the disk has {size(free)} free: "
            "free some space or choose another folder"
        )
    if free >= need.most:
        return ""
    return (
        f"{config.out}: checkpoints and the result take up to {size(need.most)}, and the disk has {size(free)} free: "
        "the run may end when it saves; free some space, or save less often with --save-steps"
    )
