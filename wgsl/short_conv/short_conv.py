"""The short convolution of DeltaNet, forward and backward. Shader: short_conv.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, wgsl_type
from wgrad.wgsl.elementwise.reduce import sum_rows
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_RUN = 64  # tokens that one invocation sums for the weight's gradient


def _launch(
    device: Runtime, entry: str, arrays: list[Array], dy: Array | None, out: Array, elements: int, silu: bool
) -> None:
    x, weight, doc_start, _ = arrays
    batch, given, channels = x.shape
    tokens, width = doc_start.shape[1], weight.shape[1]
    constants: dict[str, Constant] = {"WIDTH": width, "RUN": _RUN, "BACKWARD": dy is not None, "SILU": silu}
    types = {"X_T": x, "Y_T": out, **({} if dy is None else {"DY_T": dy})}
    constants |= {name: wgsl_type(array.dtype) for name, array in types.items()}
    params = [batch, tokens, given, channels, -(-batch * tokens // _RUN)]
    groups, work = device.groups(elements, GROUP), 2.0 * x.nbytes
    device.launch("short_conv", [*arrays, dy, out], params, groups, constants, entry=entry, work=work)


@implements("short_conv")
def short_conv(device: Runtime, x: Array, weight: Array, doc_start: Array, cache_len: Array, silu: bool) -> Array:
    y = device.empty((x.shape[0], doc_start.shape[1], x.shape[2]), x.dtype)
    _launch(device, "forward", [x, weight, doc_start, cache_len], None, y, y.size, silu)
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
    _launch(device, "backward", arrays, dy, dx, dx.size, silu)
    if not need_dweight:
        return dx, None
    runs = -(-dy.shape[0] * dy.shape[1] // _RUN)
    sums = device.empty((runs, weight.size))
    _launch(device, "dweight", arrays, dy, sums, runs * weight.shape[0], silu)
    dweight = device.empty((weight.size,))
    sum_rows(device, sums, dweight, False)
    return dx, device.view(dweight, weight.shape)
