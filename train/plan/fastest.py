"""Lower bounds of the seconds of a step, by batch size, over the modes that a forecast expects to fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import Any

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.fewer_layers import DOUBT, Forecast
from wgrad.train.plan.rates import Rates
from wgrad.train.step.activations import recomputed_layers
from wgrad.train.step.dequantized import candidates


def least_seconds(fit: Any, cut: dict[int, RunOptions], rates: Rates) -> dict[int, float]:
    """Return a lower bound of the seconds of a step, by batch size.

    fit: a `Fit`. cut: options of the run with each batch size. rates: speed of the device.
    """
    found = {}
    for batch, config in cut.items():
        bounds = []
        for mode in replace(fit, config=config).modes:
            room = (1.0, math.inf) if fit.forecast is None else _room(fit, fit.forecast, cut, batch, mode)
            if room is not None:
                share, free = room
                kept = min(int(share * fit.layers) + 1, fit.layers)
                bounds.append(fit.step_seconds(_freest(fit, config, mode, kept, free), rates))
        found[batch] = min(bounds, default=math.inf)
    return found


def _freest(fit: Any, config: RunOptions, mode: dict[str, Any], kept: int, free: float) -> RunOptions:
    """Return the options of a mode that keep as much as possible on the device.

    kept: layers whose activations are kept. free: bytes for dequantized weights.
    """
    settled = replace(config, **mode)
    if mode["stream_weights"] == "on":
        settled = replace(settled, resident_layers=fit.layers)
    elif mode["gradient_checkpointing"]:
        settled = fit.keeping(settled, kept)
    if not config.offload_activations and not (fit.copies_hide and mode["stream_weights"] != "on"):
        settled = replace(settled, offload_activations=False)
    if not fit.weights_open or mode["stream_weights"] == "on":
        return settled
    return replace(settled, keep_dequantized=_most_weights(fit, settled, free))


def _most_weights(fit: Any, config: RunOptions, free: float) -> int:
    """Return how many weights may be kept dequantized, at 16 bits per element.

    The output layer is left out, as in `kept_share`: many devices have no copy of it to keep.
    """
    every = candidates(fit.model_config, recomputed_layers(config, fit.model_config))
    return bisect_right(list(accumulate(2 * candidate.elements for candidate in every if not candidate.dense)), free)


def _room(
    fit: Any, forecast: Forecast, cut: dict[int, RunOptions], batch: int, mode: dict[str, Any]
) -> tuple[float, float] | None:
    """Return the largest fraction of layers whose activations a mode may keep, and the bytes that are then free.

    None: the mode does not fit. Memory is assumed to grow linearly with the batch size.
    """
    few, many, limit = min(cut), max(cut), fit.limit * (1 + DOUBT)

    def peak(mode: dict[str, Any]) -> float:
        first, last = (forecast.peak(replace(cut[n], **mode)) for n in (few, many))
        if last == math.inf:  # an array of the largest batch is too large for the device
            return forecast.peak(replace(cut[batch], **mode))
        return last if few == many else first + (last - first) * (batch - few) / (many - few)

    if (least := peak(mode)) > limit:
        return None
    if not mode["gradient_checkpointing"] or mode["stream_weights"] == "on":
        return 1.0, limit - least
    whole = peak({**fit.modes[0], "keep_norms": fit.config.keep_norms or False})
    if whole == math.inf:  # it says nothing about runs that keep some layers
        return 1.0, limit - least
    share = 1.0 if whole <= least else min((limit - least) / (whole - least), 1.0)
    of_layer = max(whole - least, 0.0) / fit.layers
    return share, max(limit - whole, 0.0) + of_layer
