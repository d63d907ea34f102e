"""Cross-entropy of a linear layer, without its logits ever standing in memory whole.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al., Liger Kernel (2024).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Tensor, Weight, differentiable
from wgrad.autograd.ops.elementwise import capped, check_softcap, softcap_slope
from wgrad.autograd.precision import compute_dtype, up
from wgrad.device.contract import Array

IGNORE_INDEX = -100
# Logits of one chunk of tokens: at most this many elements (a single token is always taken).
LOGIT_ELEMENTS = 1 << 22


@differentiable
def linear_cross_entropy(ctx: Context, x: Tensor, weight: Weight, targets: Array, *, softcap: float = 0.0) -> Tensor:
    """x [N, C], weight [V, C], targets int32 [N] (-100 ignored) -> loss float32 [1], summed over the targets.

    The gradients come out of the forward (logits stand there a chunk at a time); the backward multiplies them by its
    seed, in float32, before x's dtype is restored: a loss scale must act before the rounding to float16.
    """
    need_dx, need_dweight, *_ = ctx.needs_grad
    options = {"need_dx": need_dx, "need_dweight": need_dweight, "softcap": softcap}
    loss, dx, dweight = ctx.device.linear_cross_entropy(x, weight, targets, **options)
    ctx.save(dx, dweight)
    ctx.dtype = x.dtype
    return loss


@linear_cross_entropy.backward
def _(ctx: Context, dloss: Array) -> Any:
    dx, dweight = ctx.saved
    if dx is not None:
        dx = ctx.device.scale_by(dx, dloss)
        dx = dx if dx.dtype == ctx.dtype else ctx.device.cast(dx, ctx.dtype)
    return dx, None if dweight is None else ctx.device.scale_by(dweight, dloss)


@linear_cross_entropy.operator
def _(
    args: Args,
    x: Array,
    weight: Array,
    targets: Array,
    *,
    need_dx: bool = True,
    need_dweight: bool = False,
    softcap: float = 0.0,
) -> None:
    """x [N, C], weight [V, C] (float32, float16, bfloat16), targets int32 [N], -100 ignored ->
    loss float32 [1] (sum over targets of -log softmax(x weight^T)), dx [N, C] float32, dweight [V, C] float32
    (None where not needed). With softcap > 0 the logits are softcap * tanh(x weight^T / softcap). They stand in
    memory only a chunk of tokens (and of vocabulary) at a time. Where x is of 16 bits a device may round the gradients
    of the logits to its dtype, scaled as it likes, before they are multiplied."""
    args.array("x", x, "N C", "float", "flatten batch and time into N")
    args.array("weight", weight, "V C", "weight", "the output layer is [vocab, hidden]")
    args.array("targets", targets, "N", "i32", "one target for each row of x, -100 to ignore it")
    check_softcap(args, "softcap", softcap)


@linear_cross_entropy.reference
def _(
    x: np.ndarray, weight: np.ndarray, targets: np.ndarray, need_dx: bool, need_dweight: bool, softcap: float
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    compute = compute_dtype(x, weight)
    wide, table = up(x, compute), up(weight, compute)
    dx = np.zeros(x.shape, compute) if need_dx else None
    dweight = np.zeros(weight.shape, compute) if need_dweight else None
    loss = np.zeros(1, np.float64)
    counted = np.flatnonzero(targets != IGNORE_INDEX)
    step = max(1, LOGIT_ELEMENTS // table.shape[0])
    for start in range(0, counted.size, step):
        rows = counted[start : start + step]
        logits = wide[rows] @ table.T
        if softcap:
            logits = capped(logits, softcap)
        slope = softcap_slope(logits, softcap) if softcap else None
        own = (np.arange(rows.size), targets[rows])
        logits -= logits.max(axis=1, keepdims=True)
        at_target = logits[own]
        p = np.exp(logits, out=logits)
        total = p.sum(axis=1, keepdims=True)
        loss += np.sum(np.log(total[:, 0]) - at_target, dtype=np.float64)
        p /= total
        p[own] -= 1  # now d loss / d logits
        if slope is not None:
            p *= slope
        p = _rounded(p, x.dtype)
        if dx is not None:
            dx[rows] = p @ table
        if dweight is not None:
            dweight += p.T @ wide[rows]
    return loss.astype(compute), dx, dweight


def _rounded(dlogits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As they are multiplied where x is of `dtype`."""
    if dtype.itemsize != 2:
        return dlogits
    scale = dlogits.dtype.type(2.0**15)  # of -1 to 1: in float16 small ones last
    return (dlogits * scale).astype(dtype).astype(dlogits.dtype) / scale
