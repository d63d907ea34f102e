"""Keep as many weights dequantized as fit into the memory that a run leaves, then the MLPs' gated activations.

A byte of most activations saves far more time than a byte of a dequantized weight, and that more than a byte of a gated
activation (bench/notes/checkpointing.md). So they are kept in this order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.plan import Plan
from wgrad.train.step.activations import itemsize_of, recomputed_layers
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


def with_weights(fit: Any, found: Plan, room: int) -> Plan | None:
    """Return the plan that keeps the most weights dequantized, and then gated activations, below the limit.

    Args:
        fit: A `Fit`.
        found: Plan that fits and keeps none.
        room: Bytes that it leaves, at most.
    """
    return with_gated(fit, most_dequantized(found, room, fit.fitting), fit.fitting)


def with_gated(fit: Any, found: Plan | None, fitting: Callable[[RunOptions], Plan | None]) -> Plan | None:
    """Return the plan that also keeps gated activations, if all else is kept, it fits and there are any; else `found`.

    There are none where nothing saves them: in experts, and without LoRA on down_proj.

    Args:
        fit: A `Fit`.
        found: Plan that fits; None: there is none.
        fitting: Plans a run; returns None if it does not fit.
    """
    if found is None:
        return None
    config, model = found.config, fit.model_config
    wanted = config.keep_gated is None and fit.weights_open and model.gated
    weights = found.dequantized
    whole = weights.count == len(weights.sizes) and not recomputed_layers(config, model)
    products = config.rows * config.max_length * model.num_hidden_layers * model.mlp_width * itemsize_of(config)
    if not wanted or not whole or found.reserved_bytes + products > fit.limit:
        return found
    gated = fitting(replace(config, keep_gated=True))
    return found if gated is None or gated.activation_bytes <= found.activation_bytes else gated
