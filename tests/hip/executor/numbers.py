"""Arrays as kernels read them; bfloat16 through ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def encode(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """x as a kernel reads it (kind: f32, f16 or bf16), and the values of that in float64."""
    stored = x.astype(DTYPES[kind])
    return stored, stored.astype(np.float64)
