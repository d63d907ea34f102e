"""The precision rule of the NumPy references: what they compute in, and what they round to."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT64 = np.dtype(np.float64)
FLOAT32 = np.dtype(np.float32)


def compute_dtype(*arrays: np.ndarray | None) -> np.dtype:
    """float64 when any argument is float64 (the oracle), else float32: float16 and bfloat16 are computed in float32."""
    return FLOAT64 if any(a is not None and a.dtype == FLOAT64 for a in arrays) else FLOAT32


def up(array: np.ndarray, compute: np.dtype) -> np.ndarray:
    """The array in the compute dtype; not a copy when it is already."""
    return array.astype(compute, copy=False)


def finish(result: np.ndarray, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Round a result to the dtype asked for. An oracle (float64) is never rounded."""
    return np.asarray(result, dtype=compute if compute == FLOAT64 else dtype, order="C")


def store(result: np.ndarray, out: np.ndarray | None, accumulate: bool, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Return the result, or write it into `out` (added to what is there when `accumulate`)."""
    if out is None:
        return finish(result, dtype, compute)
    out[...] = up(out, compute) + result if accumulate else result
    return out
