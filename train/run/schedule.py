"""The learning rate of each step: linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.checkpoints import Schedule


def warmup_steps(config: RunOptions, total_steps: int) -> int:
    """--warmup-steps as steps: a share of `total_steps`, rounded up, or the number itself."""
    steps = math.ceil(config.warmup_steps * total_steps) if config.warmup_steps < 1 else int(config.warmup_steps)
    return min(steps, total_steps)


def learning_rate(config: RunOptions, step: int, total_steps: int) -> float:
    """Rate of step 0 ... total_steps - 1.

    With w warm-up steps: lr (step + 1) / w before step w, so that already the first step moves; from there, with
    p = (step - w) / (total_steps - w) in [0, 1): lr (1 + cos pi p) / 2, or lr (1 - p), or lr. No step has rate 0.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule_of(config: RunOptions, total_steps: int) -> Schedule:
    """The schedule of the run as it was started now; kept in checkpoints, so that a change can be told."""
    return Schedule(total_steps, config.learning_rate, config.lr_scheduler_type, config.warmup_steps)


def schedule_note(
    config: RunOptions, total_steps: int, done: int, before: Schedule | None, ended_at: int | None
) -> str:
    """Return a line on a schedule that is no longer as in the checkpoint behind `done` steps, or "".

    ended_at: steps of a run that ended, and is prolonged.
    """
    if before is None or before == schedule_of(config, total_steps):
        return ""
    ended = f", prolonged from {ended_at}" if ended_at else ""
    first = min(done, total_steps - 1)
    return (
        f"schedule: {total_steps} steps in all{ended} (was {before.steps}); {config.lr_scheduler_type} from a peak of "
        f"{config.learning_rate:g}; step {first + 1} has learning rate {learning_rate(config, first, total_steps):.2e}"
    )
