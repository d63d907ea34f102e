"""Matrix products with an epilogue: low-rank term, bias and residual."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.precision import compute_dtype, store, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, DType
from wgrad.device.host_matmul import host_matmul

LowRank = tuple[Array, Array]
MOST_BATCHES = 65_535  # the limit of one dimension of a dispatch


@differentiable
def gemm(
    ctx: Context,
    a: Tensor,
    b: Weight,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    dtype: DType = None,
) -> Tensor:
    """alpha * op(a) op(b): [M, K] (trans_a: [K, M]) times [K, N] (trans_b: [N, K]); a leading batch axis on both."""
    ctx.save(a, b)
    ctx.trans, ctx.alpha = (trans_a, trans_b), alpha
    out: Tensor = ctx.device.gemm(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, dtype=dtype)
    return out


@gemm.backward
def _(ctx: Context, dy: Array) -> Any:
    a, b = ctx.saved
    ta, tb = ctx.trans
    gemm = partial(ctx.device.gemm, alpha=ctx.alpha)
    da = db = None
    if ctx.needs_grad[0]:  # d op(a) = dy op(b)^T, transposed when a was
        da = gemm(b, dy, trans_a=tb, trans_b=True, dtype=a.dtype) if ta else gemm(dy, b, trans_b=not tb, dtype=a.dtype)
    if ctx.needs_grad[1]:  # d op(b) = op(a)^T dy, transposed when b was
        db = gemm(dy, a, trans_a=True, trans_b=ta, dtype=b.dtype) if tb else gemm(a, dy, trans_a=not ta, dtype=b.dtype)
    return da, db


@gemm.operator
def _(
    args: Args,
    a: Array,
    b: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    bias: Array | None = None,
    residual: Array | None = None,
    lowrank: LowRank | None = None,
    out: Array | None = None,
    accumulate: bool = False,
    dtype: DType = None,
) -> dict[str, Any]:
    """out = alpha * op(a) op(b) + u op(v) + bias + residual (+ out when `accumulate`).

    a: [M, K] or [K, M] (trans_a); b: [K, N] or [N, K] (trans_b), also bfloat16; a leading batch axis on both
    makes it batched, of at most 65,535 matmuls. lowrank = (u [M, r], v): v is [N, r] when trans_b, else [r, N]; the
    LoRA term. bias [N] float32, residual and out [M, N]. Any mix of dtypes is allowed. bias, residual and lowrank are
    for the unbatched matmul only. dtype: of the result; out's where there is one, else by default a's.
    """
    args.rule(math.isfinite(alpha), f"alpha must be finite, got {alpha}")
    batch = "B " if len(getattr(a, "shape", ())) == 3 else ""
    args.array("a", a, batch + ("K M" if trans_a else "M K"))
    args.array("b", b, batch + ("N K" if trans_b else "K N"), "weight", "check trans_a and trans_b")
    size = args.size
    if batch:
        args.rule(
            size["B"] <= MOST_BATCHES, f"a batch holds at most {MOST_BATCHES:,} matmuls, got {size['B']:,}; split it"
        )
        for name, value in (("bias", bias), ("residual", residual), ("lowrank", lowrank)):
            args.rule(
                value is None, f"{name} is for a matmul without a batch axis, got a {list(a.shape)}; add it after"
            )
    epilogue(args, bias, residual, lowrank, trans_b)
    if out is None:
        args.rule(not accumulate, "out must be given where the result is added to it, got accumulate without out")
        return {"dtype": args.dtype("dtype", dtype, a.dtype)}
    args.array("out", out, batch + "M N")
    return {"dtype": out.dtype}


def epilogue(
    args: Args,
    bias: Array | None,
    residual: Array | None,
    lowrank: LowRank | None,
    trans_v: bool,
    columns: str = "N",
    parts: int = 0,
) -> None:
    """Check the terms that are added to a product [M, columns].

    parts: the number of weights in a stack (0: no stack); u then has r columns for each.
    """
    if bias is not None:
        args.array("bias", bias, columns, "f32")
    if residual is not None:
        args.array("residual", residual, f"M {columns}")
    if lowrank is not None:
        args.rule(
            isinstance(lowrank, tuple) and len(lowrank) == 2,
            f"lowrank must be two arrays (u, v), got {type(lowrank).__name__}; pass u [M, r] and v",
        )
        args.array("lowrank[0]", lowrank[0], "M ranks" if parts else "M r")
        args.array("lowrank[1]", lowrank[1], f"{columns} r" if trans_v else f"r {columns}")
        if parts:
            wanted, got = parts * args.size["r"], args.size["ranks"]
            args.rule(got == wanted, f"lowrank[0] must have r columns for each of {parts} parts, {wanted}, got {got}")


@gemm.reference
def _(
    a: np.ndarray,
    b: np.ndarray,
    trans_a: bool,
    trans_b: bool,
    alpha: float,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    lowrank: LowRank | None,
    out: np.ndarray | None,
    accumulate: bool,
    dtype: Any,
) -> np.ndarray:
    compute = compute_dtype(a, b, bias, residual, out, *(lowrank or ()))
    left = up(a, compute).swapaxes(-1, -2) if trans_a else up(a, compute)
    right = up(b, compute).swapaxes(-1, -2) if trans_b else up(b, compute)
    y = host_matmul(left, right)
    if alpha != 1.0:
        y *= compute.type(alpha)
    add_epilogue(y, bias, residual, lowrank, trans_b, compute)
    return store(y, out, accumulate, dtype, compute)


def add_epilogue(
    y: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    lowrank: LowRank | None,
    trans: bool,
    compute: np.dtype,
    parts: tuple[int, ...] = (),
) -> None:
    """Add u op(v) + bias + residual to y in place. parts: the number of columns of each weight of a stack."""
    if lowrank is not None:
        u, v = up(lowrank[0], compute), up(lowrank[1], compute)
        if parts:
            for columns, ranks in blocks(parts, v.shape[1]):
                y[:, columns] += host_matmul(u[:, ranks], v[columns].T)
        else:
            y += host_matmul(u, v.T if trans else v)
    if bias is not None:
        y += up(bias, compute)
    if residual is not None:
        y += up(residual, compute)


def blocks(parts: tuple[int, ...], rank: int) -> Iterator[tuple[slice, slice]]:
    """Yield the columns and the ranks of each part of a stack."""
    at = 0
    for number, columns in enumerate(parts):
        yield slice(at, at + columns), slice(number * rank, (number + 1) * rank)
        at += columns
