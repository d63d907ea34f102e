"""The learning rate of each step: linear warm-up, then cosine, linear or constant. A note on too few steps."""

from __future__ import annotations

import math

from wgrad.device.shown import counted
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.checkpoints import Schedule

FEW_STEPS = 50  # a run with fewer hardly learns


def warmup_steps(config: RunOptions, total_steps: int) -> int:
    """Return --warmup-steps as a number of steps: a fraction below 1 of `total_steps`, rounded up, or the value.

    It may be more than `total_steps`: the rate then does not reach its peak, as in transformers.
    """
    return math.ceil(config.warmup_steps * total_steps) if config.warmup_steps < 1 else int(config.warmup_steps)


def learning_rate(config: RunOptions, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, 0 <= step < total_steps.

    With w warm-up steps: lr (step + 1) / w before step w. From there, with p = (step - w) / (total_steps - w) in
    [0, 1): lr (1 + cos pi p) / 2, lr (1 - p) or lr. No step has rate 0, not even the first.
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
    """Return the schedule of this start of the run; checkpoints keep it, so that a resumed run reports changes."""
    return Schedule(total_steps, config.learning_rate, config.lr_scheduler_type, config.warmup_steps)


def schedule_note(
    config: RunOptions, total_steps: int, done: int, before: Schedule | None, ended_at: int | None
) -> str:
    """Return a line about a schedule that differs from that of the checkpoint, or "".

    Args:
        config: Options of the run.
        total_steps: Steps of the whole run.
        done: Steps of the checkpoint.
        before: Schedule of the checkpoint.
        ended_at: Steps of the finished run that is extended; None: it was not finished.
    """
    if before is None or before == schedule_of(config, total_steps):
        return ""
    ended = f", extended from {ended_at}" if ended_at else ""
    first = min(done, total_steps - 1)
    return (
        f"schedule: {counted(total_steps, 'step')} in all{ended} (was {before.steps}); {config.lr_scheduler_type} "
        f"from a peak of {config.learning_rate:g}; step {first + 1} has learning rate "
        f"{learning_rate(config, first, total_steps):.2e}"
    )


def few_steps(config: RunOptions, steps: int) -> str:
    """Return a note on a run whose data give too few steps to learn from, or ""."""
    if steps >= FEW_STEPS or config.max_steps or config.lr_sweep:
        return ""
    epochs = -(-config.epochs * FEW_STEPS // steps)
    return (
        f"note: the run has only {counted(steps, 'step')}, which is little to learn from: --epochs {epochs} makes it "
        f"{FEW_STEPS} or more"
    )


def long_warmup(config: RunOptions, steps: int) -> str:
    """Return a note on a warm-up that is longer than the run, or ""."""
    warmup = warmup_steps(config, steps)
    if warmup <= steps:
        return ""
    peak = learning_rate(config, steps - 1, steps)
    return (
        f"note: --warmup-steps {warmup} is more than the run's {counted(steps, 'step')}, so its learning rate "
        f"reaches only {peak:.2e}: use a fraction such as 0.03, or fewer steps"
    )
