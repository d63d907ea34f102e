"""Rows of a table by number."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


class Embedding(Function):
    """table [V, C], ids int32 [N] -> [N, C]. The backward (for a trained table) adds up the rows of each id."""

    @staticmethod
    def forward(ctx: Context, table: Array, *, ids: Array, dtype: Any) -> Array:
        dtype = schema.embedding(ctx.device, table, ids, dtype)
        ctx.save(ids)
        ctx.vocab_size = int(table.shape[0])
        return ctx.device.embedding(table, ids, dtype=dtype)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        (ids,) = ctx.saved
        return (ctx.device.embedding_backward(dy, ids, ctx.vocab_size),)
