"""Keep as many weights dequantized as fit into the memory that a run leaves.

A byte of kept activations saves far more time than a byte of a dequantized weight (bench/notes/checkpointing.md), so
activations come first.
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
    """Return the plan that keeps the most weights dequantized, or `found` if none can be kept.

    Args:
        found: Plan that fits and keeps none.
        room: Bytes that it leaves, at most.
        fitting: Plans a run; returns None if it does not fit.
    """
    sizes = found.dequantized.sizes

    def plan(count: int) -> Plan | None:
        return fitting(replace(found.config, keep_dequantized=True if count == len(sizes) else count))

    # The memory pool has other gaps with more blocks, so a few weights less may fit than bytes suggest.
    guess = bisect_right(list(accumulate(sizes)), room) if any(sizes) else 0
    return planned_beside(found, guess, plan, guess)
