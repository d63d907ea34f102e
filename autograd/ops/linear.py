"""Linear layers with a trainable weight, or with a frozen quantized weight that is decoded inside the matmul.

Source: Dettmers et al., QLoRA (2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.checkpoint import keeps_matmuls, once
from wgrad.autograd.decoded_weights import decoded_rows
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.gradients import GradientWithCopy, whole_of
from wgrad.autograd.operators import Rules, operator
from wgrad.autograd.ops.elementwise import column_sums
from wgrad.autograd.ops.gemm import LowRank, add_epilogue, epilogue
from wgrad.autograd.ops.lora import (
    LoraTerm,
    lora_add_grad_x,
    lora_forward,
    lora_grad_a,
    lora_grad_ub,
    lora_term,
    weight_grad,
)
from wgrad.autograd.ops.quantize import frozen_compute_dtype, frozen_weight
from wgrad.autograd.precision import finish, up
from wgrad.autograd.rows import as_rows, with_shape
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, DType
from wgrad.device.formats.frozen_weight import FrozenWeight, formats
from wgrad.device.host_matmul import host_matmul

# A frozen weight is decoded this many elements at a time, so that it is never in memory whole.
DECODE_ELEMENTS = 1 << 22


@Rules
def _rules(
    args: Args,
    x: Array,
    weight: Weight,
    bias: Array,
    residual: Array,
    lora: LoraTerm | None,
    dtype: DType,
    unread: bool,
) -> dict[str, Any]:
    """Check x [..., K], weight [N, K], bias [N] or None, residual [..., N] or None; return the dtype of the result."""
    args.array("x", x, "... K")
    frozen = isinstance(weight, FrozenWeight)
    kinds = " or ".join(kind.__name__ for kind in formats().values())
    args.rule(
        frozen == (args.op == "linear_quantized"),
        f"weight must be {'an array: call linear_quantized' if frozen else f'an {kinds}: call linear, or quantize it'}"
        f", got {type(weight).__name__}",
    )
    if isinstance(weight, FrozenWeight):
        frozen_weight(args, "weight", weight)
        args.axes("weight", weight, "N K", "pass the weight of this layer ([out, in])")
    else:
        hint = "a linear weight is [out, in]: transpose it if it is [in, out]"
        args.array("weight", weight, "N K", "weight", hint)
    if bias is not None:
        args.array("bias", bias, "N", "f32")
    if residual is not None:
        wanted = (*tuple(x.shape)[:-1], args.size["N"])
        args.array("residual", residual, "... N")
        args.rule(
            tuple(residual.shape) == wanted,
            f"residual must have the shape of the result {list(wanted)}, got {list(residual.shape)}; reshape it",
        )
    if lora is not None:
        lora_term(args, lora, len(weight.parts) if isinstance(weight, FrozenWeight) else 0)
    made = args.dtype("dtype", dtype, x.dtype)
    if unread:
        args.rule(
            residual is not None and residual.dtype == made,
            f"unread needs a residual of the result's dtype {made}, which is returned instead, got"
            f" {None if residual is None else residual.dtype}; leave unread out",
        )
    return {"dtype": made}


@differentiable
def linear(
    ctx: Context,
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    *,
    residual: Tensor | None = None,
    lora: LoraTerm | None = None,
    dtype: DType = None,
    unread: bool = False,
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, + LoRA + bias [N] + residual [..., N] -> [..., N].

    unread: only the gradients are needed, as for the last product of a recomputed stretch (`is_recomputing`). The
    product is not computed; the residual, which must have the result's dtype, is returned in its place."""
    dtype = _rules.check(ctx.device, (x, weight, bias, residual, lora, dtype, unread), {}, ctx.name)["dtype"]
    rows = as_rows(ctx, x)
    # It takes as long to compute as reading x, and has few columns.
    u = None if lora is None else once(lambda: (lora_forward(ctx, rows, lora),))[0]
    only_for_a = not ctx.needs_grad[1] and lora is not None and ctx.grad_buffer(4) is not None
    ctx.x_again = ctx.recomputed_by(0) if only_for_a else None
    wants_x = (ctx.needs_grad[1] or lora is not None) and ctx.x_again is None
    ctx.save(rows if wants_x else None, weight if ctx.needs_grad[0] else None, u)
    ctx.x_shape, ctx.x_dtype, ctx.lora = tuple(x.shape), x.dtype, lora
    ctx.parts = weight.parts if isinstance(weight, FrozenWeight) else ()
    ctx.residual_dtype = None if residual is None else residual.dtype
    if x.dtype.itemsize < dtype.itemsize:
        # The result is a part of a float32 sum: its gradient is rounded once, to the dtype that the products take.
        ctx.rounds_to = x.dtype
    if unread and residual is not None:
        return residual
    options: dict[str, Any] = {
        "bias": bias,
        "residual": None if residual is None else as_rows(ctx, residual),
        "lowrank": None if lora is None or lora.rounded else (u, lora.b),
        "dtype": dtype,
    }

    def product() -> tuple[Array]:
        if isinstance(weight, FrozenWeight):
            return (ctx.device.linear_quantized(rows, weight, **options),)
        return (ctx.device.gemm(rows, weight, trans_b=True, **options),)

    (y,) = once(product) if residual is None and keeps_matmuls() else product()
    out: Tensor = with_shape(ctx, y, (*ctx.x_shape[:-1], y.shape[-1]))
    return out


@linear.backward
def _(ctx: Context, given: Array | GradientWithCopy) -> Any:
    (x, weight, u), lora, dy = ctx.saved, ctx.lora, whole_of(given)
    rows = as_rows(ctx, given.rounded if isinstance(given, GradientWithCopy) else dy)
    if ctx.rounds_to is not None and rows.dtype != ctx.rounds_to:
        rows = ctx.device.cast(rows, ctx.rounds_to)
    dx = da = du = db = None
    if lora is not None:
        du, db = lora_grad_ub(ctx, 5, rows, u, lora, ctx.parts)
    if ctx.needs_grad[0]:
        fused = (du, lora.a) if lora is not None and lora.dropout == 0 and not lora.rounded else None
        product = ctx.device.linear_quantized_backward if isinstance(weight, FrozenWeight) else ctx.device.gemm
        dx = product(rows, weight, lowrank=fused, dtype=ctx.x_dtype)
        if lora is not None and fused is None and not lora.rounded:
            dx = lora_add_grad_x(ctx, dx, du, lora)
        dx = with_shape(ctx, dx, ctx.x_shape)
    dweight = weight_grad(ctx, 1, rows, x) if ctx.needs_grad[1] else None
    if lora is not None:
        if ctx.x_again is None:
            da = lora_grad_a(ctx, 4, du, x, lora)
        else:
            ctx.x_again.then(lambda made: lora_grad_a(ctx, 4, du, as_rows(ctx, made), lora))
    return dx, dweight, column_sums(ctx, 2, dy), _residual_grad(ctx, 3, dy), da, db


def _residual_grad(ctx: Context, i: int, dy: Array) -> Array | None:
    """Return the gradient of argument i, a residual: dy in the residual's dtype."""
    if not ctx.needs_grad[i]:
        return None
    return dy if dy.dtype == ctx.residual_dtype else ctx.device.cast(dy, ctx.residual_dtype)


linear_quantized = linear.renamed(
    "linear_quantized", "`linear` with a frozen weight of any format (device/formats), decoded inside the matmul."
)


@linear_quantized.operator
def _(
    args: Args,
    x: Array,
    weight: FrozenWeight,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    lowrank: LowRank | None = None,
    dtype: DType = None,
) -> dict[str, Any]:
    """[M, K] x dequant([N, K])^T + u v^T (u [M, r], v [N, r]) + bias + residual -> [M, N]; default dtype: x's.

    For a stack of P weights (`FrozenWeight.parts`) u is [M, P r], r columns for each part."""
    args.array("x", x, "M K")
    frozen_weight(args, "weight", weight)
    args.axes("weight", weight, "N K", "pass the weight of this layer ([out, in])")
    epilogue(args, bias, residual, lowrank, True, parts=len(weight.parts))
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@linear_quantized.reference
def _(
    x: np.ndarray,
    weight: FrozenWeight,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    lowrank: LowRank | None,
    dtype: Any,
) -> np.ndarray:
    compute = frozen_compute_dtype(weight, x, bias, residual, *(lowrank or ()))
    left = up(x, compute)
    y = np.empty((x.shape[0], weight.shape[0]), compute)
    for rows in _row_chunks(weight):
        y[:, rows] = host_matmul(left, decoded_rows(weight, rows.start, rows.stop, compute).T)
    add_epilogue(y, bias, residual, lowrank, True, compute, weight.parts)
    return finish(y, dtype, compute)


@operator
def linear_quantized_backward(
    args: Args, dy: Array, weight: FrozenWeight, *, lowrank: LowRank | None = None, dtype: DType = None
) -> dict[str, Any]:
    """[M, N] dy x dequant([N, K]) + u v (u [M, r], v [r, K]) -> dx [M, K]; default dtype: dy's."""
    args.array("dy", dy, "M N")
    frozen_weight(args, "weight", weight)
    args.axes("weight", weight, "N K", "pass the weight of this layer ([out, in])")
    epilogue(args, None, None, lowrank, False, "K")
    return {"dtype": args.dtype("dtype", dtype, dy.dtype)}


@linear_quantized_backward.reference
def _(dy: np.ndarray, weight: FrozenWeight, lowrank: LowRank | None, dtype: Any) -> np.ndarray:
    compute = frozen_compute_dtype(weight, dy, *(lowrank or ()))
    grad = up(dy, compute)
    dx = np.zeros((dy.shape[0], weight.shape[1]), compute)
    for rows in _row_chunks(weight):
        dx += host_matmul(grad[:, rows], decoded_rows(weight, rows.start, rows.stop, compute))
    add_epilogue(dx, None, None, lowrank, False, compute)
    return finish(dx, dtype, compute)


def _row_chunks(weight: FrozenWeight) -> list[slice]:
    rows, columns = weight.shape
    step = max(1, DECODE_ELEMENTS // columns)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
