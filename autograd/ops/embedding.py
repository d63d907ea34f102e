"""Rows of a table by number."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Function
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.device.contract import Array, DType


@operator
def embedding(args: Args, table: Array, ids: Array, *, dtype: DType = np.float32) -> dict[str, Any]:
    """table [V, C] float32, float16 or bfloat16, ids int32 [N] -> [N, C]."""
    args.array("table", table, "V C", "weight").array("ids", ids, "N", "i32", "flatten it")
    return {"dtype": args.dtype("dtype", dtype, np.float32)}


@embedding.reference
def _(table: np.ndarray, ids: np.ndarray, dtype: Any) -> np.ndarray:
    compute = compute_dtype(table)
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


class Embedding(Function):
    """table [V, C], ids int32 [N] -> [N, C]. The backward (for a trained table) adds up the rows of each id."""

    @staticmethod
    def forward(ctx: Context, table: Array, *, ids: Array, dtype: Any) -> Array:
        rows = ctx.device.embedding(table, ids, dtype=dtype)
        ctx.save(ids)
        ctx.vocab_size = int(table.shape[0])
        return rows

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        (ids,) = ctx.saved
        return (ctx.device.embedding_backward(dy, ids, ctx.vocab_size),)
