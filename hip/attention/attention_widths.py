"""Heads whose width the matrix kernels lack, as wider ones: zeros behind them change no score, and what they make of
the results is cut off again."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.runtime.columns import put, take
from wgrad.hip.runtime.runtime import Runtime

WIDTHS = (64, 128, 256)  # that attention on the matrix units has kernels for
_NARROW = 32  # heads up to here would be zeros for the most part


def kernel_width(width: int) -> int:
    """The width of the kernels that serve heads of this one; 0 where none do."""
    return next((wide for wide in WIDTHS if _NARROW < width <= wide), 0)


def widened(device: Runtime, x: Array, width: int) -> Array:
    """x [B, T, H, D] with zeros behind each row, up to `width` elements; x itself where it has as many."""
    *outer, narrow = x.shape
    if narrow == width:
        return x
    out = device.zeros((x.size // narrow, width), x.dtype)
    put(device, device.view(x, (out.shape[0], narrow)), out, 0)
    return device.view(out, (*outer, width))


def narrowed(device: Runtime, x: Array, width: int) -> Array:
    """The first `width` elements of each row of x [B, T, H, D]; x itself where it has no more."""
    *outer, wide = x.shape
    if wide == width:
        return x
    return device.view(take(device, device.view(x, (x.size // wide, wide)), 0, width), (*outer, width))
