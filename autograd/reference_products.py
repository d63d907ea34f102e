"""Reference products: `gemm` and the NF4 product with its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, store, up
from wgrad.autograd.reference_nf4 import dequantize_rows, nf4_compute_dtype
from wgrad.device.contract import NF4Array

# An NF4 weight is decoded this many elements at a time, so that it never stands in memory whole.
DECODE_ELEMENTS = 1 << 22

LowRank = tuple[np.ndarray, np.ndarray]


class ReferenceProducts:
    @operator
    def gemm(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        alpha: float = 1.0,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        lowrank: LowRank | None = None,
        out: np.ndarray | None = None,
        accumulate: bool = False,
        dtype: Any = None,
    ) -> np.ndarray:
        compute = compute_dtype(a, b, bias, residual, out, *(lowrank or ()))
        left = up(a, compute).swapaxes(-1, -2) if trans_a else up(a, compute)
        right = up(b, compute).swapaxes(-1, -2) if trans_b else up(b, compute)
        y = left @ right
        if alpha != 1.0:
            y *= compute.type(alpha)
        _epilogue(y, bias, residual, lowrank, trans_b, compute)
        return store(y, out, accumulate, a.dtype if dtype is None else dtype, compute)

    @operator
    def linear_nf4(
        self,
        x: np.ndarray,
        weight: NF4Array,
        *,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        lowrank: LowRank | None = None,
        dtype: Any = None,
    ) -> np.ndarray:
        compute = nf4_compute_dtype(weight, x, bias, residual, *(lowrank or ()))
        left = up(x, compute)
        y = np.empty((x.shape[0], weight.shape[0]), compute)
        for rows in _row_chunks(weight):
            y[:, rows] = left @ dequantize_rows(weight, rows, compute).T
        _epilogue(y, bias, residual, lowrank, True, compute)
        return finish(y, x.dtype if dtype is None else dtype, compute)

    @operator
    def linear_nf4_backward(
        self, dy: np.ndarray, weight: NF4Array, *, lowrank: LowRank | None = None, dtype: Any = None
    ) -> np.ndarray:
        compute = nf4_compute_dtype(weight, dy, *(lowrank or ()))
        grad = up(dy, compute)
        dx = np.zeros((dy.shape[0], weight.shape[1]), compute)
        for rows in _row_chunks(weight):
            dx += grad[:, rows] @ dequantize_rows(weight, rows, compute)
        _epilogue(dx, None, None, lowrank, False, compute)
        return finish(dx, dy.dtype if dtype is None else dtype, compute)


def _epilogue(
    y: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    lowrank: LowRank | None,
    trans: bool,
    compute: np.dtype,
) -> None:
    """y += u op(v) + bias + residual, in place."""
    if lowrank is not None:
        u, v = up(lowrank[0], compute), up(lowrank[1], compute)
        y += u @ (v.T if trans else v)
    if bias is not None:
        y += up(bias, compute)
    if residual is not None:
        y += up(residual, compute)


def _row_chunks(weight: NF4Array) -> list[slice]:
    rows, columns = weight.shape
    step = max(1, DECODE_ELEMENTS // columns)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
