"""Log-odds of log-probabilities, forward and backward. Kernel: log_odds.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import eights, implements, type_codes
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime


@implements("log_odds")
def log_odds(device: Runtime, x: Array) -> Array:
    return _log_odds(device, x, None)


@implements("log_odds_backward")
def log_odds_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _log_odds(device, x, dy)


def _log_odds(device: Runtime, x: Array, dy: Array | None) -> Array:
    """Return y (without dy), or dx, in x's dtype."""
    y = device.empty(x.shape, x.dtype)
    arrays = [x, dy, y]
    work = sum(a.nbytes for a in arrays if a is not None)
    device.launch("log_odds", "log_odds", [*arrays, Long(x.size), type_codes(*arrays)], eights(x.size), work=work)
    return y
