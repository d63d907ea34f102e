"""Log-odds of log-probabilities, forward and backward. Shader: log_odds.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, flat_parts, vector_width
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.runtime import Runtime


@implements("log_odds")
def log_odds(device: Runtime, x: Array) -> Array:
    return _log_odds(device, x, None)


@implements("log_odds_backward")
def log_odds_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _log_odds(device, x, dy)


def _log_odds(device: Runtime, x: Array, dy: Array | None) -> Array:
    """Return y (without dy), or dx, in the dtype of x."""
    y = device.empty(x.shape, x.dtype)
    vec, arrays = vector_width(x.size), [x, dy, y]
    constants = {"BACKWARD": dy is not None, **element_types(vec, X_T=x, DY_T=x if dy is None else dy)}
    for _, parts in flat_parts(device, [a for a in arrays if a is not None]):
        views = iter(parts)
        bound = [None if a is None else next(views) for a in arrays]
        n, work = parts[0].size // vec, float(sum(part.nbytes for part in parts))
        device.launch("log_odds", bound, [n], device.groups(n, GROUP), constants, work=work)
    return y
