"""SiLU, GELU (tanh form), SwiGLU and GEGLU, forward and backward. Shader: activation.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, flat_parts, row_parts, vector_width
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("silu")
def silu(device: Runtime, x: Array) -> Array:
    return _activation(device, x, None, None, None, gelu=False)[0]


@implements("silu_backward")
def silu_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _activation(device, x, None, dy, None, gelu=False)[0]


@implements("gelu")
def gelu(device: Runtime, x: Array) -> Array:
    return _activation(device, x, None, None, None, gelu=True)[0]


@implements("gelu_backward")
def gelu_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _activation(device, x, None, dy, None, gelu=True)[0]


@implements("swiglu")
def swiglu(device: Runtime, gate: Array, up: Array | None) -> Array:
    if up is None:
        return _side_by_side(device, gate, None, None, gelu=False)
    return _activation(device, gate, up, None, None, gelu=False)[0]


@implements("swiglu_backward")
def swiglu_backward(
    device: Runtime, dy: Array, gate: Array, up: Array | None, activated: Array | None
) -> tuple[Array, Array | None]:
    if up is None:
        return _side_by_side(device, gate, dy, activated, gelu=False), None
    return _activation(device, gate, up, dy, activated, gelu=False)


@implements("geglu")
def geglu(device: Runtime, gate: Array, up: Array | None) -> Array:
    if up is None:
        return _side_by_side(device, gate, None, None, gelu=True)
    return _activation(device, gate, up, None, None, gelu=True)[0]


@implements("geglu_backward")
def geglu_backward(
    device: Runtime, dy: Array, gate: Array, up: Array | None, activated: Array | None
) -> tuple[Array, Array | None]:
    if up is None:
        return _side_by_side(device, gate, dy, activated, gelu=True), None
    return _activation(device, gate, up, dy, activated, gelu=True)


def _activation(
    device: Runtime, x: Array, up: Array | None, dy: Array | None, again: Array | None, *, gelu: bool
) -> tuple[Array, Array | None]:
    """Return y (without dy), or dx and dup, in the dtypes of x and up. again: also receives y in the backward."""
    y = device.empty(x.shape, x.dtype)
    dup = device.empty(up.shape, up.dtype) if up is not None and dy is not None else None
    vec = vector_width(x.size)
    arrays = [x, up, dy, y, dup, again]
    per = 4 if dy is None else 2  # a backward reads three arrays: fewer elements keep as many bytes in flight
    constants: dict[str, Constant] = {
        "PER": per,
        "GELU": gelu,
        "GATED": up is not None,
        "BACKWARD": dy is not None,
        "DUP": dup is not None,
        "JOINED": False,
        "AGAIN": again is not None,
        **element_types(vec, X_T=x, UP_T=x if up is None else up, DY_T=x if dy is None else dy),
    }
    for _, parts in flat_parts(device, [a for a in arrays if a is not None]):
        views = iter(parts)
        bound = [None if a is None else next(views) for a in arrays]
        n = parts[0].size // vec
        work = float(sum(part.nbytes for part in parts))
        device.launch("activation", bound, [n, 0], device.groups(n, GROUP * per), constants, work=work)
    return y, dup


def _side_by_side(device: Runtime, x: Array, dy: Array | None, again: Array | None, *, gelu: bool) -> Array:
    """Apply a gated activation to x [R, 2 C], whose columns are gate and up.

    Returns y [R, C] (without dy), or dx [R, 2 C]. again: also receives y in the backward.
    """
    rows, half = x.shape[0], x.shape[1] // 2
    y = device.empty((rows, half) if dy is None else x.shape, x.dtype)
    vec = vector_width(half)
    per = 4 if dy is None else 2
    switches = {"GELU": gelu, "GATED": True, "BACKWARD": dy is not None, "DUP": False, "JOINED": True}
    switches["AGAIN"] = again is not None
    types = element_types(vec, X_T=x, UP_T=x, DY_T=x if dy is None else dy)
    for _, count, (part, grad, out, activated) in row_parts(device, [x, dy, y, again]):
        n = count * half // vec
        work = float(part.nbytes + out.nbytes)
        groups, arrays = device.groups(n, GROUP * per), [part, None, grad, out, None, activated]
        device.launch("activation", arrays, [n, half // vec], groups, {"PER": per, **switches, **types}, work=work)
    return y
