"""Reference element-wise operators and reductions, and the counter-based random numbers of dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, store, up

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10


def philox(counters: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox-4x32-10: counters uint32 [n, 4], key uint32 [2] -> uint32 [n, 4].

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
    """
    x0, x1, x2, x3 = np.ascontiguousarray(counters.T)
    key0, key1 = np.uint32(key[0]), np.uint32(key[1])
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2^32
        for _ in range(_ROUNDS):
            product0, product1 = _MULTIPLIERS[0] * x0.astype(np.uint64), _MULTIPLIERS[1] * x2.astype(np.uint64)
            x0, x1, x2, x3 = (
                (product1 >> np.uint64(32)).astype(np.uint32) ^ x1 ^ key0,
                product1.astype(np.uint32),
                (product0 >> np.uint64(32)).astype(np.uint32) ^ x3 ^ key1,
                product0.astype(np.uint32),
            )
            key0, key1 = key0 + _WEYL[0], key1 + _WEYL[1]
    return np.stack([x0, x1, x2, x3], axis=1)


def dropout_keep(size: int, p: float, seed: np.ndarray, stream: int) -> np.ndarray:
    """Which of `size` elements stay, bool [size].

    Element i looks at word i % 4 of Philox-4x32-10 with key (seed[0], seed[1]) and counter (i // 4, stream, 0, 0),
    and stays when word >= floor(p * 2^32): its uniform number is word * 2^-32.
    """
    counters = np.zeros((-(-size // 4), 4), np.uint32)
    counters[:, 0], counters[:, 1] = np.arange(counters.shape[0]), stream
    words = philox(counters, seed).reshape(-1)[:size]
    return words >= np.uint32(math.floor(p * 2**32))


class ReferenceElementwise:
    @operator
    def mask(self, x: np.ndarray, keep: np.ndarray, value: float) -> np.ndarray:
        return np.where(keep != 0, x, x.dtype.type(value))

    @operator
    def add(self, a: np.ndarray, b: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
        compute = compute_dtype(a, b)
        return store(up(a, compute) + up(b, compute), out, False, a.dtype, compute)

    @operator
    def mul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        compute = compute_dtype(a, b)
        return finish(up(a, compute) * up(b, compute), a.dtype, compute)

    @operator
    def scale(self, x: np.ndarray, alpha: float) -> np.ndarray:
        compute = compute_dtype(x)
        return finish(up(x, compute) * compute.type(alpha), x.dtype, compute)

    @operator
    def scale_by(self, x: np.ndarray, factor: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x, factor)
        return finish(up(x, compute) * up(factor, compute)[0], x.dtype, compute)

    @operator
    def cast(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        return x.astype(dtype)

    @operator
    def bias(self, x: np.ndarray, b: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x, b)
        return finish(up(x, compute) + up(b, compute), x.dtype, compute)

    @operator
    def sum_rows(self, x: np.ndarray, *, out: np.ndarray | None = None, accumulate: bool = False) -> np.ndarray:
        compute = compute_dtype(x)
        return store(np.sum(up(x, compute), axis=0), out, accumulate, np.float32, compute)

    @operator
    def sum(self, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x)
        return np.sum(up(x, compute)).reshape(1)

    @operator
    def dropout(self, x: np.ndarray, p: float, seed: np.ndarray, stream: int) -> np.ndarray:
        compute = compute_dtype(x)
        keep = dropout_keep(x.size, p, seed, stream).reshape(x.shape)
        return finish(np.where(keep, up(x, compute) / compute.type(1 - p), compute.type(0)), x.dtype, compute)
