"""ALiBi: scores that grow with the key's position, by a slope of each head, instead of rotary embeddings.

The term is a part of the keys: a further element holds it, and that of queries is 1. 16-bit floats hold it exactly,
as it is rounded to bfloat16. Positions count from the first token of a document.

Source: Press et al., ALiBi (arXiv 2108.12409).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array

FURTHER = 16  # elements that are added to a head, so that its width stays a multiple of 16; all but one are 0


def alibi_table(heads: int, positions: int) -> np.ndarray:
    """Return the terms before the scores are scaled, float32 [positions, heads], rounded as transformers has Falcon's.

    Slopes are powers of 2 ** (-8 / heads). If `heads` is no power of two, those of twice the power of two below it
    fill up the rest.
    """
    most = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / most) for i in range(1, most + 1)]
    slopes += [2.0 ** (-4 * i / most) for i in range(1, 2 * (heads - most), 2)]
    rounded = (np.array(values, np.float32).astype(ml_dtypes.bfloat16) for values in (slopes, range(positions)))
    slope, position = (values.astype(np.float32) for values in rounded)
    return np.asarray(position[:, None] * slope, ml_dtypes.bfloat16).astype(np.float32)


def with_alibi(
    q: Tensor, k: Tensor, v: Tensor, table: Array, positions: Array, zero: Array, one: Array
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with FURTHER elements in each head.

    Args:
        q, k, v: [N, H, D].
        table: `alibi_table` on the device.
        positions: Position of each token, int32 [N].
        zero, one: float32 [1] with these values.
    """
    device, shape = q.device, q.shape[:2]
    term = F.embedding(table, positions, dtype=k.dtype, device=device).reshape(*shape, 1)
    zeros, ones = (Tensor(x, device).to(k.dtype).reshape(1, 1, 1) for x in (zero, one))
    rest = zeros.expand(*shape, FURTHER - 1)
    q, k = F.cat([q, ones.expand(*shape, 1), rest], 2), F.cat([k, term, rest], 2)
    return q, k, F.cat([v, zeros.expand(*shape, FURTHER)], 2)
