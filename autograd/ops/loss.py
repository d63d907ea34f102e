"""Cross-entropy of a linear layer whose logits are never in memory at once.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al., Liger Kernel (2024).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.ops.elementwise import capped, check_softcap, softcap_slope
from wgrad.autograd.precision import compute_dtype, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.device.host_matmul import host_matmul

IGNORE_INDEX = -100
# Logits of one chunk of tokens: at most this many elements (a single token is always taken).
LOGIT_ELEMENTS = 1 << 22

# Rows of the gradient that are multiplied by their seeds at a time.
WEIGHED_ROWS = 4096


@differentiable
def linear_cross_entropy(
    ctx: Context,
    x: Tensor,
    weight: Weight,
    targets: Array,
    *,
    bias: Weight | None = None,
    softcap: float = 0.0,
    per_target: bool = False,
) -> Tensor:
    """x [N, C], weight [V, C], targets int32 [N] (-100 ignored), bias float32 [V] of the logits -> loss float32 [1],
    summed over the targets; with per_target float32 [N], 0 for ignored targets (weight and bias then have no gradient).

    The forward computes the gradients too, a chunk of logits at a time. The backward multiplies them by its seed in
    float32 before casting to x's dtype, since a loss scale must act before the rounding to float16.
    """
    need_dx, need_dweight, _, need_dbias, *_ = ctx.needs_grad
    options: dict[str, Any] = {"need_dx": need_dx, "need_dweight": need_dweight, "need_dbias": need_dbias}
    options |= {"bias": bias, "softcap": softcap, "per_target": per_target}
    loss: Tensor
    loss, dx, dweight, dbias = ctx.device.linear_cross_entropy(x, weight, targets, **options)
    ctx.save(dx, dweight, dbias)
    ctx.dtype, ctx.per_target = x.dtype, per_target
    return loss


@linear_cross_entropy.backward
def _(ctx: Context, dloss: Array) -> Any:
    dx, dweight, dbias = ctx.saved
    if ctx.per_target:
        return None if dx is None else _weigh_rows(ctx, dx, dloss), None, None, None
    if dx is not None:
        dx = ctx.device.scale_by(dx, dloss)
        dx = dx if dx.dtype == ctx.dtype else ctx.device.cast(dx, ctx.dtype)
    dweight, dbias = (None if grad is None else ctx.device.scale_by(grad, dloss) for grad in (dweight, dbias))
    return dx, dweight, None, dbias


def _weigh_rows(ctx: Context, dx: Array, dloss: Array) -> Array:
    """Return dx [N, C] with row n multiplied by dloss[n], in the dtype of x."""
    device, (n, c) = ctx.device, dx.shape
    out = device.empty((n, c), ctx.dtype)
    ones = device.empty((1, c), dloss.dtype)
    device.fill(ones, 1.0)
    for first in range(0, n, WEIGHED_ROWS):
        rows = min(WEIGHED_ROWS, n - first)
        seeds = device.gemm(device.view(dloss, (rows, 1), first), ones)  # dloss[n] in all columns of row n
        part = device.mul(device.view(dx, (rows, c), first * c), seeds)
        part = part if part.dtype == ctx.dtype else device.cast(part, ctx.dtype)
        device.copy(part, device.view(out, (rows, c), first * c))
    return out


@linear_cross_entropy.operator
def _(
    args: Args,
    x: Array,
    weight: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    need_dx: bool = True,
    need_dweight: bool = False,
    need_dbias: bool = False,
    softcap: float = 0.0,
    per_target: bool = False,
) -> None:
    """x [N, C], weight [V, C] (float32, float16, bfloat16), targets int32 [N], -100 ignored, bias [V] float32 or None
    -> loss float32 [1], dx [N, C] float32, dweight [V, C] float32, dbias [V] float32 (None where not needed).

    loss: sum over targets of -log softmax(x weight^T + bias); with per_target its terms, float32 [N], 0 for ignored
    targets. The gradients are those of the sum in either case. With softcap > 0 the logits are
    softcap * tanh((x weight^T + bias) / softcap). Only the logits of a chunk of tokens (and of vocabulary) are in
    memory at a time. For 16-bit x, a device may round the gradients of the logits to x's dtype, with any scale, before
    multiplying them."""
    args.array("x", x, "N C", "float", "flatten batch and time into N")
    args.array("weight", weight, "V C", "weight", "the output layer is [vocab, hidden]")
    args.array("targets", targets, "N", "i32", "one target for each row of x, -100 to ignore it")
    check_softcap(args, "softcap", softcap)
    if bias is not None:
        args.array("bias", bias, "V", "f32")
    args.rule(bias is not None or not need_dbias, "need_dbias asks for the gradient of a bias: give the bias")
    for name, needed in (("weight", need_dweight), ("bias", need_dbias)):
        args.rule(
            not (per_target and needed),
            f"per_target has no gradient of the {name}: leave one of the two out, or detach the {name}",
        )


@linear_cross_entropy.reference
def _(
    x: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    bias: np.ndarray | None,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    softcap: float,
    per_target: bool,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    compute = compute_dtype(x, weight, bias)
    wide, table = up(x, compute), up(weight, compute)
    dx = np.zeros(x.shape, compute) if need_dx else None
    dweight = np.zeros(weight.shape, compute) if need_dweight else None
    dbias = np.zeros(weight.shape[0], compute) if need_dbias else None
    loss = np.zeros(targets.size if per_target else 1, np.float64)
    counted = np.flatnonzero(targets != IGNORE_INDEX)
    step = max(1, LOGIT_ELEMENTS // table.shape[0])
    for start in range(0, counted.size, step):
        rows = counted[start : start + step]
        logits = host_matmul(wide[rows], table.T)
        if bias is not None:
            logits += up(bias, compute)
        if softcap:
            logits = capped(logits, softcap)
        slope = softcap_slope(logits, softcap) if softcap else None
        own = (np.arange(rows.size), targets[rows])
        logits -= logits.max(axis=1, keepdims=True)
        at_target = logits[own]
        p = np.exp(logits, out=logits)
        total = p.sum(axis=1, keepdims=True)
        terms = np.log(total[:, 0]) - at_target
        if per_target:
            loss[rows] = terms
        else:
            loss += np.sum(terms, dtype=np.float64)
        p /= total
        p[own] -= 1  # now d loss / d logits
        if slope is not None:
            p *= slope
        p = _rounded(p, x.dtype)
        if dx is not None:
            dx[rows] = host_matmul(p, table)
        if dweight is not None:
            dweight += host_matmul(p.T, wide[rows])
        if dbias is not None:
            dbias += p.sum(axis=0)
    return loss.astype(compute), dx, dweight, dbias


def _rounded(dlogits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round the gradients of the logits as a device may for x of this dtype."""
    if dtype.itemsize != 2:
        return dlogits
    scale = dlogits.dtype.type(2.0**15)  # values lie in -1 to 1; scaled, small ones do not underflow in float16
    values: np.ndarray = (dlogits * scale).astype(dtype).astype(dlogits.dtype) / scale
    return values
