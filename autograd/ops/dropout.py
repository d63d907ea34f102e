"""Dropout with counter-based random numbers, the same on every device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.device.shown import short

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
    """Return a mask of the elements that dropout keeps, bool [size].

    Element i looks at word i % 4 of Philox-4x32-10 with key (seed[0], seed[1]) and counter (i // 4, stream, 0, 0),
    and stays when word >= floor(p * 2^32): its uniform number is word * 2^-32.
    """
    counters = np.zeros((-(-size // 4), 4), np.uint32)
    counters[:, 0], counters[:, 1] = np.arange(counters.shape[0]), stream
    words = philox(counters, seed).reshape(-1)[:size]
    return words >= np.uint32(math.floor(p * 2**32))


def probability(args: Args, p: float) -> None:
    args.rule(0 <= p < 1, f"p must be in [0, 1), got {short(p)}; it is the probability of dropping an element")


def dropout_stream(args: Args, stream: int) -> None:
    args.rule(
        0 <= stream < 2**32, f"stream must be in [0, 2^32), got {short(stream)}; number the dropout layers from 0"
    )


@differentiable
def dropout(ctx: Context, x: Tensor, p: float, seed: Array, stream: int) -> Tensor:
    """Keep with probability 1 - p, divide by 1 - p; seed uint32 [2], stream a number of this layer's own."""
    ctx.p, ctx.seed, ctx.stream = p, seed, stream
    out: Tensor = ctx.device.dropout(x, p, seed, stream)
    return out


@dropout.backward
def _(ctx: Context, dy: Array) -> Any:
    return (ctx.device.dropout(dy, ctx.p, ctx.seed, ctx.stream),)


@dropout.operator
def _(args: Args, x: Array, p: float, seed: Array, stream: int) -> None:
    """Keep with probability 1 - p and divide by 1 - p. Keep bit of element i: counter-based, from
    (i, stream, seed uint32 [2]) by Philox-4x32-10, the same on every device. Its own backward."""
    args.any_shape("x", x).array("seed", seed, "2", "u32")
    probability(args, p)
    dropout_stream(args, stream)


@dropout.reference
def _(x: np.ndarray, p: float, seed: np.ndarray, stream: int) -> np.ndarray:
    compute = compute_dtype(x)
    keep = dropout_keep(x.size, p, seed, stream).reshape(x.shape)
    return finish(np.where(keep, up(x, compute) / compute.type(1 - p), compute.type(0)), x.dtype, compute)
