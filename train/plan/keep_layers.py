"""Choose of how many layers the activations are kept: as many as fit, by forecasts and few dry runs of all layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.fewer_layers import DOUBT
from wgrad.train.plan.memory_limit import in_large_chunks
from wgrad.train.plan.plan import Plan
from wgrad.train.step.search import planned_beside


def cannot_fit(fit: Any, mode: dict[str, Any], batch: int) -> bool:
    """Return whether a mode keeps all activations, and takes far more than the limit even without norms' outputs.

    It is a forecast: whatever may fit is planned. fit: a `Fit`.
    """
    if mode["gradient_checkpointing"] or fit.config.gradient_checkpointing != AUTO or fit.forecast is None:
        return False
    peak: float = fit.forecast.peak(without_norms(fit.of_batch(batch, mode)))
    most: float = fit.limit * (1 + DOUBT)
    return peak > most


def most_kept(fit: Any, found: Plan) -> Plan:
    """Return a plan that keeps the activations of as many layers as fit, searching from the number that equal layers
    would allow. found: a plan with all recomputed."""
    layers, config = fit.layers, without_norms(found.config)
    all_kept = fit.keeping(config, layers)
    highest = math.inf if fit.forecast is None else fit.forecast.peak(all_kept)
    if highest == math.inf and (whole := fit.unlimited(all_kept)) is not None:
        highest = whole.peak_bytes
    fit.peaks.clear()
    fit.peaks[0] = found.peak_bytes
    if highest < math.inf:
        fit.peaks[layers] = round(highest)
    each = max((highest - found.peak_bytes) / layers, 1)

    def plan(kept: int) -> Plan | None:
        """Plan with large chunks of the MLP until a number fits: mostly they fit with the largest that does."""
        small = fit.keeping(config, kept)
        made: Plan | None = None if fitting else in_large_chunks(None, small, fit.fitting)
        made = made or fit.fitting(small)
        if made is not None:
            fitting.append(kept)
        return made

    def further(plan: Plan) -> int:
        return int((fit.limit - plan.reserved_bytes) / each)

    fitting = list[int]()
    known = highest < math.inf  # if keeping all exceeds another limit than memory, the search has nothing to go by
    # Little of the last layer is kept at the peak: its activations are freed before other layers are recomputed.
    return planned_beside(found, further(found) + 1, plan, layers - bool(config.keep_norms), further if known else None)


def without_norms(config: RunOptions) -> RunOptions:
    """Return options that keep no norms' outputs, unless they ask for them."""
    return replace(config, keep_norms=config.keep_norms or False)
