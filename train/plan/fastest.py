"""Least seconds of a step of each batch size, in the modes that fit as a forecast has it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.fewer_layers import Forecast
from wgrad.train.plan.speed import Rates

_DOUBT = 0.02  # a part of the limit by which what is foreseen may be wrong


def least_seconds(fit: Any, cut: dict[int, RunOptions], rates: Rates) -> dict[int, float]:
    """Return the least seconds of a step by batch size. fit: a `Fit`. cut: the run with each."""
    found = {}
    for batch, config in cut.items():
        bounds = []
        for mode in replace(fit, config=config).modes:
            share = 1.0 if fit.forecast is None else _share(fit, fit.forecast, cut, batch, mode)
            if share is not None:
                kept = min(int(share * fit.layers) + 1, fit.layers)
                bounds.append(fit.step_seconds(_freest(fit, config, mode, kept), rates))
        found[batch] = min(bounds, default=math.inf)
    return found


def _freest(fit: Any, config: RunOptions, mode: dict[str, Any], kept: int) -> RunOptions:
    """A mode with the activations of so many layers kept, and as few inputs offloaded as the options say."""
    settled = replace(config, **mode)
    if not mode["gradient_checkpointing"]:
        return settled
    if mode["stream_weights"] == "on":
        settled = replace(settled, resident_layers=fit.layers)
    else:
        settled = fit.keeping(settled, kept)
    if fit.copies_hide and mode["stream_weights"] != "on":
        return settled
    return replace(settled, offload_activations=config.offload_activations)


def _share(fit: Any, forecast: Forecast, cut: dict[int, RunOptions], batch: int, mode: dict[str, Any]) -> float | None:
    """The part of the layers whose activations a mode may keep, at most. None: it does not fit. Memory is taken to grow
    by as much with each row."""
    few, many, limit = min(cut), max(cut), fit.limit * (1 + _DOUBT)

    def peak(mode: dict[str, Any]) -> float:
        first, last = (forecast.peak(replace(cut[n], **mode)) for n in (few, many))
        return last if few == many else first + (last - first) * (batch - few) / (many - few)

    if (least := peak(mode)) > limit:
        return None
    if not mode["gradient_checkpointing"] or mode["stream_weights"] == "on":
        return 1.0
    whole = peak({**fit.modes[0], "keep_norms": fit.config.keep_norms or False})
    return 1.0 if whole <= least else min((limit - least) / (whole - least), 1.0)
