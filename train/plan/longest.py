"""Search for the longest sequences and the largest batch that fit, first with fewer layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from wgrad.train.plan.fewer_layers import DOUBT
from wgrad.train.plan.plan import Plan
from wgrad.train.step.resident import plannable
from wgrad.train.step.search import FIRST, beside, largest

_CLEAR = 0.5  # share of the limit up to which whatever is forecast for few layers fits


def most_that_fits(fit: Any, options: Callable[[int], dict[str, Any]], most: int, beside_more: int = 0) -> int:
    """Return the largest number up to `most` whose options fit; 0: none fits.

    fit: a `Fit`. beside_more: The largest number that fits with options that take more memory, if it is known.
    """

    def plan(count: int) -> Plan | None:
        found: Plan | None = fit.plan(**options(count))
        return found

    forecast = fit.forecast
    if forecast is None:
        return largest(plan, most, fit.limit)

    if most > FIRST and forecast.peak(fit.changed(**options(most))) <= fit.limit * (1 - DOUBT):
        if beside_more >= most or plan(most) is not None:
            return most
    counts = (1, min(FIRST, max(most, 1)))
    first, last = (forecast.others(fit.changed(**options(count))) for count in counts)
    if last == math.inf:  # not even a few layers fit the device, whatever the limit
        return largest(plan, counts[1], fit.limit)
    each = (last - first) / max(counts[1] - 1, 1)

    def foreseen(count: int) -> Any:
        config, others = fit.changed(**options(count)), first + each * (count - 1)
        if count in counts and (peak := forecast.peak(config)) <= fit.limit * _CLEAR:
            return SimpleNamespace(peak_bytes=peak)
        found = forecast.fits(config, plannable(fit.limit) - others)
        return None if found is None else SimpleNamespace(peak_bytes=found.peak_bytes + others)

    return beside(largest(foreseen, most, fit.limit), plan, most)
