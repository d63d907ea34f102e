"""SiLU, GELU (tanh form) and their gated forms. Source: Shazeer, GLU Variants Improve Transformer (2020)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import with_backward
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array

# The tanh form of GELU (Hendrycks and Gimpel, 2016): 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
GELU_SCALE = 0.7978845608028654
GELU_CUBIC = 0.044715


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinity, and 1 / infinity the right 0
        values: np.ndarray = 1 / (1 + np.exp(-x))
        return values


def _silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative."""
    s = sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative. (1 + tanh(z)) / 2 is written as sigmoid(2 z), which keeps its digits for negative x."""
    inner = 2 * GELU_SCALE * (x + GELU_CUBIC * x * x * x)
    slope = 2 * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
    s = sigmoid(inner)
    return x * s, s + x * s * (1 - s) * slope


@with_backward("silu_backward")
def silu(args: Args, x: Tensor) -> None:
    """x * sigmoid(x), any shape."""
    args.any_shape("x", x)


@silu.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(_silu(up(x, compute))[0], x.dtype, compute)


@operator
def silu_backward(args: Args, dy: Array, x: Array) -> None:
    """-> dx."""
    args.any_shape("dy", dy).same_shape("dy", dy, "x", x)


@silu_backward.reference
def _(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(dy, x)
    return finish(up(dy, compute) * _silu(up(x, compute))[1], x.dtype, compute)


@with_backward("gelu_backward")
def gelu(args: Args, x: Tensor) -> None:
    """The tanh approximation: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), any shape."""
    args.any_shape("x", x)


@gelu.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(_gelu(up(x, compute))[0], x.dtype, compute)


@operator
def gelu_backward(args: Args, dy: Array, x: Array) -> None:
    """-> dx."""
    args.any_shape("dy", dy).same_shape("dy", dy, "x", x)


@gelu_backward.reference
def _(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(dy, x)
    return finish(up(dy, compute) * _gelu(up(x, compute))[1], x.dtype, compute)


@with_backward("swiglu_backward", "activated")
def swiglu(args: Args, gate: Tensor, up: Tensor | None = None) -> None:
    """silu(gate) * up, of one shape. Without `up`: gate [R, 2 C] has both side by side -> [R, C]."""
    _gate_and_up(args, gate, up)


@swiglu.reference
def _(gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    return _gated(_silu, gate, up)


@operator
def swiglu_backward(
    args: Args, dy: Array, gate: Array, up: Array | None = None, *, activated: Array | None = None
) -> None:
    """-> dgate, dup; without `up`: dgate [R, 2 C] (both halves, as in gate) and None. activated, when given, is
    overwritten with swiglu of gate and up."""
    _gate_and_up(args, gate, up, dy, activated)


@swiglu_backward.reference
def _(
    dy: np.ndarray, gate: np.ndarray, up: np.ndarray | None, activated: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    if activated is not None:
        activated[...] = _gated(_silu, gate, up)
    return _gated_backward(_silu, dy, gate, up)


@with_backward("geglu_backward", "activated")
def geglu(args: Args, gate: Tensor, up: Tensor | None = None) -> None:
    """gelu(gate) * up, of one shape. Without `up`: gate [R, 2 C] has both side by side -> [R, C]."""
    _gate_and_up(args, gate, up)


@geglu.reference
def _(gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    return _gated(_gelu, gate, up)


@operator
def geglu_backward(
    args: Args, dy: Array, gate: Array, up: Array | None = None, *, activated: Array | None = None
) -> None:
    """-> dgate, dup; without `up`: dgate [R, 2 C] (both halves, as in gate) and None. activated, when given, is
    overwritten with geglu of gate and up."""
    _gate_and_up(args, gate, up, dy, activated)


@geglu_backward.reference
def _(
    dy: np.ndarray, gate: np.ndarray, up: np.ndarray | None, activated: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    if activated is not None:
        activated[...] = _gated(_gelu, gate, up)
    return _gated_backward(_gelu, dy, gate, up)


def _gate_and_up(
    args: Args, gate: Array, up: Array | None, dy: Array | None = None, activated: Array | None = None
) -> None:
    if dy is not None and activated is not None:
        args.any_shape("dy", dy).same_shape("dy", dy, "activated", activated)
        args.rule(
            activated.dtype == gate.dtype,
            f"activated must have the dtype of gate, {gate.dtype}, got {activated.dtype}; allocate it with that dtype",
        )
    if up is not None:
        args.any_shape("gate", gate).same_shape("gate", gate, "up", up)
        if dy is not None:
            args.any_shape("dy", dy).same_shape("dy", dy, "gate", gate)
        return
    args.array("gate", gate, "R W")
    width = args.size["W"]
    args.rule(width % 2 == 0, f"gate must have gate and up side by side where up is left out, got {width} columns")
    if dy is not None:
        args.array("dy", dy, f"R {width // 2}")


def _gated(act: Any, gate: np.ndarray, value: np.ndarray | None) -> np.ndarray:
    if value is None:
        return _gated(act, *np.split(gate, 2, axis=1))
    compute = compute_dtype(gate, value)
    return finish(act(up(gate, compute))[0] * up(value, compute), gate.dtype, compute)


def _gated_backward(
    act: Any, dy: np.ndarray, gate: np.ndarray, value: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    if value is None:
        both = _gated_backward(act, dy, *np.split(gate, 2, axis=1))
        return np.concatenate(both, axis=1), None  # type: ignore[arg-type]
    compute = compute_dtype(dy, gate, value)
    grad, (activated, slope) = up(dy, compute), act(up(gate, compute))
    dgate = finish(grad * up(value, compute) * slope, gate.dtype, compute)
    return dgate, finish(grad * activated, value.dtype, compute)
