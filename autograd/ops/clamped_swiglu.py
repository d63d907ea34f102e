"""SwiGLU of interleaved gate and up columns, both clamped. Source: gpt-oss in transformers."""

from __future__ import annotations

from typing import Any

from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.lazy import Lazy, apply, view_of
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device


@differentiable
def clamped_swiglu(ctx: Context, x: Tensor, alpha: float, limit: float) -> Tensor:
    """x [R, 2 C], gate in the even and up in the odd columns -> (up + 1) gate sigmoid(alpha gate) [R, C], with gate
    clamped to at most limit, and up to [-limit, limit]."""
    ctx.save(x)
    ctx.alpha, ctx.limit = alpha, limit
    gate, up = _clamped(*_halves(x, ctx.device), limit)
    y: Tensor = ((up + 1.0) * gate * apply("sigmoid", gate * alpha)).astype(x.dtype).array()
    return y


@clamped_swiglu.backward
def _(ctx: Context, dy: Array) -> Any:
    (x,), alpha, limit = ctx.saved, ctx.alpha, ctx.limit
    gate, up = _halves(x, ctx.device)
    near, within = _clamped(gate, up, limit)
    grad, share = view_of(dy, ctx.device), apply("sigmoid", near * alpha)
    dgate = grad * (within + 1.0) * share * (near * alpha * (1.0 - share) + 1.0) * apply("le", gate, limit)
    dup = grad * near * share * apply("le", apply("abs", up), limit)
    dx = ctx.device.empty(tuple(x.shape), x.dtype)
    for offset, half in enumerate((dgate, dup)):
        half.write(dx, ((x.shape[1], 2), offset))
    return dx, None, None


def _halves(x: Array, device: Device) -> tuple[Lazy, Lazy]:
    """Return gate and up, each [R, C]."""
    rows, width = x.shape
    both = view_of(x, device)
    gate, up = (both.viewed((rows, width // 2), (width, 2), offset) for offset in (0, 1))
    return gate, up


def _clamped(gate: Lazy, up: Lazy, limit: float) -> tuple[Lazy, Lazy]:
    return apply("minimum", gate, limit), apply("maximum", apply("minimum", up, limit), -limit)
