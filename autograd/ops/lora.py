"""The LoRA term of a linear layer: y + scaling * (dropout(x) A^T) B^T. Source: Hu et al., LoRA (2021).

The product with B goes into the epilogue of the base product (`lowrank`), so only u = scaling * dropout(x) A^T [M, r]
stands in memory. It stays float32 and is what the backward reads again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context
from wgrad.autograd.ops.dropout import dropout_stream, probability
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array


class LoraTerm(NamedTuple):
    """a: lora_A [r, K], b: lora_B [N, r], float32. scaling: alpha / r (rsLoRA: alpha / sqrt(r)).

    dropout: probability, on the way into A only. It needs seed (uint32 [2] on the device) and a stream of its own per
    layer, so that a recomputation draws the same mask.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0
    seed: Array | None = None
    stream: int = 0


def lora_term(args: Args, lora: LoraTerm) -> None:
    """What must hold of the term of a layer [N, K]."""
    args.array("lora.a", lora.a, "r K", "f32", "lora_A is [r, in]")
    args.array("lora.b", lora.b, "N r", "f32", "lora_B is [out, r]")
    args.rule(math.isfinite(lora.scaling), f"lora.scaling must be finite, got {lora.scaling}; it is alpha / r")
    probability(args, lora.dropout)
    if lora.dropout > 0:
        args.array("lora.seed", lora.seed, "2", "u32", "dropout needs a seed")
        dropout_stream(args, lora.stream)


def lora_forward(ctx: Context, x: Array, lora: LoraTerm) -> Array:
    """x [M, K] -> u float32 [M, r]."""
    return ctx.device.gemm(_dropped(ctx, x, lora), lora.a, trans_b=True, alpha=lora.scaling, dtype=np.float32)


def lora_grad_u(ctx: Context, dy: Array, lora: LoraTerm) -> Array:
    """dy [M, N] -> du float32 [M, r]; scaling is in it, as it is in u."""
    return ctx.device.gemm(dy, lora.b, alpha=lora.scaling, dtype=np.float32)


def lora_grad_weights(
    ctx: Context, inputs: tuple[int, int], dy: Array, du: Array, u: Array, x: Array, lora: LoraTerm
) -> tuple[Array | None, Array | None]:
    """dA = du^T dropout(x) [r, K] and dB = dy^T u [N, r], added to the leaves' buffers where they have them.

    inputs: which arguments A and B are.
    """
    i, j = inputs
    da = weight_grad(ctx, i, du, _dropped(ctx, x, lora)) if ctx.needs_grad[i] else None
    db = weight_grad(ctx, j, dy, u) if ctx.needs_grad[j] else None
    return da, db


def lora_add_grad_x(ctx: Context, dx: Array, du: Array, lora: LoraTerm) -> Array:
    """dx + dropout(du A), for a dx that is ours; only where there is dropout (else the product's epilogue does it)."""
    through = ctx.device.gemm(du, lora.a, dtype=dx.dtype)
    through = ctx.device.dropout(through, lora.dropout, lora.seed, lora.stream)
    return ctx.device.add(dx, through, out=dx)


def weight_grad(ctx: Context, i: int, dy: Array, x: Array) -> Array | None:
    """dW = dy^T x float32, for argument i: into its leaf's buffer (then None), or a new array."""
    buffer = ctx.grad_buffer(i)
    dw = ctx.device.gemm(dy, x, trans_a=True, out=buffer, accumulate=buffer is not None, dtype=np.float32)
    return dw if buffer is None else None


def _dropped(ctx: Context, x: Array, lora: LoraTerm) -> Array:
    if lora.dropout == 0:
        return x
    return ctx.device.dropout(x, lora.dropout, lora.seed, lora.stream)
