"""As many weights kept dequantised as fit beside what else a run keeps.

A byte of a layer's activations saves far more time than one of a dequantised weight (bench/notes/checkpointing.md), so
that layers come first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.plan import Plan
from wgrad.train.step.search import planned_beside


def most_dequantized(found: Plan, room: int, fitting: Callable[[RunOptions], Plan | None]) -> Plan:
    """Return the plan that keeps the most weights dequantised, `found` itself where none can be kept.

    Args:
        found: Fits, and keeps none.
        room: Bytes that it leaves, at most.
        fitting: Plans a run; None where it does not fit.
    """
    sizes = found.dequantized.sizes

    def plan(count: int) -> Plan | None:
        return fitting(replace(found.config, keep_dequantized=True if count == len(sizes) else count))

    # Blocks of the pool lie otherwise with more of them, so that a few less may fit than there are bytes for.
    guess = bisect_right(list(accumulate(sizes)), room) if any(sizes) else 0
    return planned_beside(found, guess, plan, guess)
