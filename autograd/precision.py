"""Precision of the NumPy references: the dtype that they compute in, and the one that they round to."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT64 = np.dtype(np.float64)
FLOAT32 = np.dtype(np.float32)


def compute_dtype(*arrays: np.ndarray | None) -> np.dtype:
    """Return float64 if any argument is float64 (the oracle), else float32, also for float16 and bfloat16."""
    return FLOAT64 if any(a is not None and a.dtype == FLOAT64 for a in arrays) else FLOAT32


def up(array: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Return an array in the compute dtype, without a copy if it has that dtype."""
    return array.astype(compute, copy=False)


def finish(result: np.ndarray, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Round a result to a dtype. The oracle (float64) is never rounded."""
    return np.asarray(result, dtype=compute if compute == FLOAT64 else dtype, order="C")


def store(result: np.ndarray, out: np.ndarray | None, accumulate: bool, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Return a result, or write it into `out`, or add it there if `accumulate` is true."""
    if out is None:
        return finish(result, dtype, compute)
    out[...] = up(out, compute) + result if accumulate else result
    return out
