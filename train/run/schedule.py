"""The learning rate of each step: linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from wgrad.train.options.finetune_config import RunOptions


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
