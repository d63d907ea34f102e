"""Heads of widths that the matrix kernels lack, padded with zeros to a wider one.

The zeros change no score; the padding of the results is cut off again.
"""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.runtime.columns import put, take
from wgrad.hip.runtime.runtime import Runtime

WIDTHS = (64, 128, 256)  # with kernels on the tensor cores
_NARROW = 32  # heads up to this width would be mostly padding


def kernel_width(width: int) -> int:
    """Return the kernels' width for heads of this width; 0 where there is none."""
    return next((wide for wide in WIDTHS if _NARROW < width <= wide), 0)


def widened(device: Runtime, x: Array, width: int) -> Array:
    """Return x [B, T, H, D] padded with zeros to D = `width`; x itself where D is that already."""
    *outer, narrow = x.shape
    if narrow == width:
        return x
    out = device.zeros((x.size // narrow, width), x.dtype)
    put(device, device.view(x, (out.shape[0], narrow)), out, 0)
    return device.view(out, (*outer, width))


def narrowed(device: Runtime, x: Array, width: int) -> Array:
    """Return x [B, T, H, :width]; x itself where D is `width`."""
    *outer, wide = x.shape
    if wide == width:
        return x
    return device.view(take(device, device.view(x, (x.size // wide, wide)), 0, width), (*outer, width))
