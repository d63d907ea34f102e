"""The LoRA term of a linear layer: y + scaling * (dropout(x) A^T) B^T. Source: Hu et al., LoRA (2021).

The product with B goes into the epilogue of the base product (`lowrank`), so only u = scaling * dropout(x) A^T [M, r]
is in memory. It is kept in float32 for the backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.dropout import dropout_stream, probability
from wgrad.autograd.ops.gemm import blocks
from wgrad.autograd.precision import compute_dtype, finish, store, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.device.formats.nf4 import MOST_PARTS, PART_ROWS
from wgrad.device.host_matmul import host_matmul


class LoraTerm(NamedTuple):
    """LoRA factors of a layer and how they are applied.

    a: lora_A [r, K], b: lora_B [N, r], float32. For a stack of P weights a is [P r, K], the A of the parts one below
    the other, as is b.
    scaling: alpha / r (rsLoRA: alpha / sqrt(r)).
    dropout: probability, for the input of A only. It needs seed (uint32 [2] on the device) and a stream number of its
    own per layer, so that a recomputation draws the same mask.
    rounded: the layer's weight already includes the term (both were rounded together), so it is not added. The
    gradients are those without rounding.
    shares: float32 [M, r], multiplied into x A^T: each row uses some of the r columns.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0
    seed: Array | None = None
    stream: int = 0
    rounded: bool = False
    shares: Array | None = None


def lora_term(args: Args, lora: LoraTerm, parts: int = 0) -> None:
    """Check the LoRA term of a layer [N, K]. parts: the number of weights in a stack (0: no stack)."""
    args.array("lora.a", lora.a, "ranks K" if parts else "r K", "f32", "lora_A is [r, in]")
    args.array("lora.b", lora.b, "N r", "f32", "lora_B is [out, r]")
    if parts:
        wanted, got = parts * args.size["r"], args.size["ranks"]
        args.rule(got == wanted, f"lora.a must have r rows for each of {parts} parts, {wanted}, got {got}")
    args.rule(math.isfinite(lora.scaling), f"lora.scaling must be finite, got {lora.scaling}; it is alpha / r")
    probability(args, lora.dropout)
    if lora.shares is not None:
        args.array("lora.shares", lora.shares, "M ranks" if parts else "M r", "f32", "a factor per row of x and of A")
    if lora.dropout > 0:
        args.array("lora.seed", lora.seed, "2", "u32", "dropout needs a seed")
        dropout_stream(args, lora.stream)


@operator
def lora_du(args: Args, dy: Array, b: Array, parts: tuple[int, ...], *, alpha: float = 1.0) -> None:
    """dy [M, N], b [N, r] float32 -> float32 [M, P r]: alpha times the product of each part's columns of dy and rows of
    b, side by side. parts: the number of columns of each of the P weights of a stack."""
    args.array("dy", dy, "M N").array("b", b, "N r", "f32")
    _stack(args, parts)


@lora_du.reference
def du_of(dy: np.ndarray, b: np.ndarray, parts: tuple[int, ...], alpha: float) -> np.ndarray:
    compute = compute_dtype(dy, b)
    grad, right = up(dy, compute), up(b, compute)
    found = [host_matmul(grad[:, columns], right[columns]) for columns, _ in blocks(parts, b.shape[1])]
    return finish(np.concatenate(found, axis=1) * compute.type(alpha), np.float32, compute)


@operator
def lora_db(
    args: Args, dy: Array, u: Array, parts: tuple[int, ...], *, out: Array | None = None, accumulate: bool = False
) -> None:
    """dy [M, N], u [M, P r] float32 -> float32 [N, r]: for each part, its columns of dy transposed times its r columns
    of u (+ out when `accumulate`)."""
    args.array("dy", dy, "M N").array("u", u, "M R", "f32")
    _stack(args, parts)
    rank, rest = divmod(args.size["R"], len(parts))
    args.rule(rest == 0, f"u must have as many columns for each of {len(parts)} parts, got {args.size['R']}")
    args.rule(out is not None or not accumulate, "out must be given where the result is added to it, got None")
    if out is not None:
        args.array("out", out, f"N {rank}", "f32")


@lora_db.reference
def db_of(
    dy: np.ndarray, u: np.ndarray, parts: tuple[int, ...], out: np.ndarray | None, accumulate: bool
) -> np.ndarray:
    compute = compute_dtype(dy, u, out)
    grad, right = up(dy, compute), up(u, compute)
    found = [
        host_matmul(grad[:, columns].T, right[:, ranks]) for columns, ranks in blocks(parts, u.shape[1] // len(parts))
    ]
    return store(np.concatenate(found), out, accumulate, np.float32, compute)


@operator
def lora_grads(
    args: Args,
    dy: Array,
    b: Array,
    u: Array,
    parts: tuple[int, ...] = (),
    *,
    alpha: float = 1.0,
    out: Array | None = None,
    accumulate: bool = False,
) -> None:
    """dy [M, N], b [N, r], u [M, P r], float32 -> `lora_du` of dy and b, and `lora_db` of dy and u, for one reading of
    dy where the device can. Without parts it is no stack: alpha dy b [M, r], and dy transposed times u [N, r]."""
    args.array("dy", dy, "M N").array("b", b, "N r", "f32").array("u", u, "M R", "f32")
    if parts:
        _stack(args, parts)
    args.array("u", u, f"M {max(1, len(parts)) * args.size['r']}", "f32")
    args.rule(out is not None or not accumulate, "out must be given where the result is added to it, got None")
    if out is not None:
        args.array("out", out, "N r", "f32")


@lora_grads.reference
def _(
    dy: np.ndarray,
    b: np.ndarray,
    u: np.ndarray,
    parts: tuple[int, ...],
    alpha: float,
    out: np.ndarray | None,
    accumulate: bool,
) -> tuple[np.ndarray, np.ndarray]:
    parts = parts or (b.shape[0],)
    return du_of(dy, b, parts, alpha), db_of(dy, u, parts, out, accumulate)


def _stack(args: Args, parts: tuple[int, ...]) -> None:
    fits = sum(parts) == args.size["N"] and all(rows > 0 and rows % PART_ROWS == 0 for rows in parts)
    args.rule(
        fits and 1 < len(parts) <= MOST_PARTS,
        f"parts must be two or three multiples of {PART_ROWS} that add up to N = {args.size['N']}, got {list(parts)}",
    )


def lora_forward(ctx: Context, x: Array, lora: LoraTerm) -> Array:
    """Return u = scaling * dropout(x) A^T, float32 [M, r], for x [M, K]."""
    u = ctx.device.gemm(_dropped(ctx, x, lora), lora.a, trans_b=True, alpha=lora.scaling, dtype=np.float32)
    return u if lora.shares is None else ctx.device.mul(u, lora.shares)


def lora_grad_ub(
    ctx: Context, i: int, dy: Array, u: Array, lora: LoraTerm, parts: tuple[int, ...]
) -> tuple[Array, Array | None]:
    """Return du, float32 [M, r], including the scaling, and dB = dy^T u [N, r], for argument i and dy [M, N].

    dB is None if it was added to the leaf's gradient buffer. parts: columns of the weights of a stack.
    """
    db = None
    if ctx.needs_grad[i]:
        buffer = ctx.grad_buffer(i)
        options = {"alpha": lora.scaling, "out": buffer, "accumulate": buffer is not None}
        du, made = ctx.device.lora_grads(dy, lora.b, u, parts, **options)
        db = made if buffer is None else None
    elif parts:
        du = ctx.device.lora_du(dy, lora.b, parts, alpha=lora.scaling)
    else:
        du = ctx.device.gemm(dy, lora.b, alpha=lora.scaling, dtype=np.float32)
    return du if lora.shares is None else ctx.device.mul(du, lora.shares), db


def lora_grad_a(ctx: Context, i: int, du: Array, x: Array, lora: LoraTerm) -> Array | None:
    """Return dA = du^T dropout(x) [r, K], for argument i; None if it was added to the leaf's gradient buffer."""
    return weight_grad(ctx, i, du, _dropped(ctx, x, lora)) if ctx.needs_grad[i] else None


def lora_add_grad_x(ctx: Context, dx: Array, du: Array, lora: LoraTerm) -> Array:
    """Add dropout(du A) to dx in place. Without dropout the epilogue of the product does this."""
    through = ctx.device.gemm(du, lora.a, dtype=dx.dtype)
    through = ctx.device.dropout(through, lora.dropout, lora.seed, lora.stream)
    return ctx.device.add(dx, through, out=dx)


def weight_grad(ctx: Context, i: int, dy: Array, x: Array) -> Array | None:
    """Return dW = dy^T x, float32, for argument i; None if it was added to the leaf's gradient buffer."""
    buffer = ctx.grad_buffer(i)
    dw = ctx.device.gemm(dy, x, trans_a=True, out=buffer, accumulate=buffer is not None, dtype=np.float32)
    return dw if buffer is None else None


def _dropped(ctx: Context, x: Array, lora: LoraTerm) -> Array:
    if lora.dropout == 0:
        return x
    return ctx.device.dropout(x, lora.dropout, lora.seed, lora.stream)
