"""SiLU, GELU (tanh form), SwiGLU and GEGLU, forward and backward. Kernel: activation.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import eights, implements, type_codes
from wgrad.hip.runtime.columns import apart, together
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime


@implements("silu")
def silu(device: Runtime, x: Array) -> Array:
    return _activation(device, x, None, None, gelu=False)[0]


@implements("silu_backward")
def silu_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _activation(device, x, None, dy, gelu=False)[0]


@implements("gelu")
def gelu(device: Runtime, x: Array) -> Array:
    return _activation(device, x, None, None, gelu=True)[0]


@implements("gelu_backward")
def gelu_backward(device: Runtime, dy: Array, x: Array) -> Array:
    return _activation(device, x, None, dy, gelu=True)[0]


@implements("swiglu")
def swiglu(device: Runtime, gate: Array, up: Array | None) -> Array:
    gate, up = _both(device, gate, up)
    return _activation(device, gate, up, None, gelu=False)[0]


@implements("swiglu_backward")
def swiglu_backward(
    device: Runtime, dy: Array, gate: Array, up: Array | None, activated: Array | None
) -> tuple[Array, Array | None]:
    return _gated_backward(device, dy, gate, up, activated, gelu=False)


@implements("geglu")
def geglu(device: Runtime, gate: Array, up: Array | None) -> Array:
    gate, up = _both(device, gate, up)
    return _activation(device, gate, up, None, gelu=True)[0]


@implements("geglu_backward")
def geglu_backward(
    device: Runtime, dy: Array, gate: Array, up: Array | None, activated: Array | None
) -> tuple[Array, Array | None]:
    return _gated_backward(device, dy, gate, up, activated, gelu=True)


def _gated_backward(
    device: Runtime, dy: Array, gate: Array, up: Array | None, activated: Array | None, *, gelu: bool
) -> tuple[Array, Array | None]:
    first, second = _both(device, gate, up)
    if activated is not None:
        _activation(device, first, second, None, gelu=gelu, out=activated)
    dgate, dup = _activation(device, first, second, dy, gelu=gelu)
    if up is not None:
        return dgate, dup
    assert dup is not None
    return together(device, [dgate, dup]), None


def _both(device: Runtime, gate: Array, up: Array | None) -> tuple[Array, Array]:
    """Return gate and up; without `up`, gate holds both side by side."""
    if up is not None:
        return gate, up
    first, second = apart(device, gate, (gate.shape[1] // 2,) * 2)
    return first, second


def _activation(
    device: Runtime, x: Array, up: Array | None, dy: Array | None, *, gelu: bool, out: Array | None = None
) -> tuple[Array, Array | None]:
    """Return y (without dy; in `out` if given), or dx and dup. y and dx have x's dtype, dup has up's."""
    y = device.empty(x.shape, x.dtype) if out is None else out
    dup = device.empty(up.shape, up.dtype) if up is not None and dy is not None else None
    arrays = [x, up, dy, y, dup]
    work = sum(a.nbytes for a in arrays if a is not None)
    arguments = [*arrays, Long(x.size), int(gelu), type_codes(*arrays)]
    device.launch("activation", "activation", arguments, eights(x.size), work=work)
    return y, dup
