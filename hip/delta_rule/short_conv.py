"""The short convolution of DeltaNet, forward and backward. Kernels: short_conv.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, implements, type_codes
from wgrad.hip.elementwise.elementwise import sum_rows
from wgrad.hip.runtime.runtime import Runtime

_RUN = 64  # tokens over which one work-item sums the weight's gradient


def _launch(device: Runtime, kernel: str, arrays: list[Array], dy: Array | None, out: Array, silu: bool) -> None:
    x, weight, doc_start, cache_len = arrays
    batch, given, channels = x.shape
    sizes = [batch, doc_start.shape[1], given, channels, weight.shape[1], int(silu), type_codes(x, dy)]
    arguments = [x, dy, weight, doc_start, cache_len, out, *sizes]
    columns = out.shape[-1]
    groups = out.size // columns * -(-columns // GROUP)
    device.launch("short_conv", kernel, arguments, (groups, 1, 1), work=2.0 * x.nbytes)


@implements("short_conv")
def short_conv(device: Runtime, x: Array, weight: Array, doc_start: Array, cache_len: Array, silu: bool) -> Array:
    y = device.empty((x.shape[0], doc_start.shape[1], x.shape[2]), x.dtype)
    _launch(device, "short_conv", [x, weight, doc_start, cache_len], None, y, silu)
    return y


@implements("short_conv_backward")
def short_conv_backward(
    device: Runtime,
    dy: Array,
    x: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    need_dweight: bool,
    silu: bool,
) -> tuple[Array, Array | None]:
    arrays, dx = [x, weight, doc_start, cache_len], device.empty(x.shape, x.dtype)
    _launch(device, "short_conv_dx", arrays, dy, dx, silu)
    if not need_dweight:
        return dx, None
    sums = device.empty((-(-dy.shape[0] * dy.shape[1] // _RUN), weight.size))
    _launch(device, "short_conv_dweight", arrays, dy, sums, silu)
    return dx, device.view(sum_rows(device, sums, None, False), weight.shape)
