"""Embedding: rows of a table by their ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device, DType
from wgrad.device.errors import ShapeError


@differentiable
def embedding(
    ctx: Context, table: Weight, ids: Array, *, dtype: DType = np.float32, device: Device | None = None
) -> Tensor:
    """table [V, C], ids int32 [N] -> [N, C]. `device` is needed when the table is not a Tensor."""
    ctx.ids, ctx.vocab_size = ids, table.shape[0]
    out: Tensor = ctx.device.embedding(table, ids, dtype=dtype)
    return out


@embedding.backward
def _(ctx: Context, dy: Array) -> Any:
    return (ctx.device.embedding_backward(dy, ctx.ids, ctx.vocab_size),)


@embedding.operator
def _(args: Args, table: Array, ids: Array, *, dtype: DType = np.float32) -> dict[str, Any]:
    """table [V, C] float32, float16 or bfloat16, ids int32 [N] -> [N, C]."""
    swapped = np.dtype(table.dtype).kind in "iu" and np.dtype(ids.dtype).kind not in "iu"
    args.rule(not swapped, "table must be the first argument and ids the second, got ids first; or write table[ids]")
    args.array("table", table, "V C", "weight").array("ids", ids, "N", "i32", "flatten it")
    return {"dtype": args.dtype("dtype", dtype, np.float32)}


@embedding.reference
def _(table: np.ndarray, ids: np.ndarray, dtype: Any) -> np.ndarray:
    compute = compute_dtype(table)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(table):
        raise ShapeError(
            f"embedding: ids must be from 0 to {len(table) - 1}, the rows of the table, got {ids.min()} to {ids.max()}"
        )
    return finish(up(table[ids], compute), dtype, compute)


@operator
def embedding_backward(args: Args, dy: Array, ids: Array, vocab_size: int) -> None:
    """-> dtable float32 [V, C]. Deterministic."""
    args.array("dy", dy, "N C").array("ids", ids, "N", "i32", "flatten it")
    args.rule(vocab_size > 0, f"vocab_size must be positive, got {vocab_size}; it is the number of the table's rows")


@embedding_backward.reference
def _(dy: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    compute = compute_dtype(dy)
    dtable = np.zeros((vocab_size, dy.shape[1]), compute)
    if ids.size:
        order = np.argsort(ids, kind="stable")
        rows, first = np.unique(ids[order], return_index=True)
        dtable[rows] = np.add.reduceat(up(dy, compute)[order], first, axis=0)
    return dtable
