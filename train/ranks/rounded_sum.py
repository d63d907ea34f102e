"""A sum between hosts in bfloat16: half the bytes, and what is rounded away is added to the next step's gradient.

Each host rounds what it has and sends every host its slice; each adds up its own slice in float32, rounds that, and
sends it to all. What either rounding leaves out stays with the host that rounded, and is part of what it has the next
time: so nothing is lost, but comes a step later.
Source: error feedback on both ways, DoubleSqueeze (arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from wgrad.train.ranks.all_reduce import Request

_BLOCK = 1 << 16  # elements at a time, which stay in the cache


class Collectives(Protocol):
    """Collectives of the hosts' leaders, called by all of them in the same order."""

    rank: int
    size: int

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> Request:
        """uint16 [size, n]: row i of `send` to leader i, whose row comes as row i of `receive`."""

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> Request:
        """uint16 [n] of each -> uint16 [size, n]."""


class RoundedSum:
    """`Between` of all_reduce.py. error: float32, of the whole array: what this host's roundings have left out so far;
    what begins beyond it is not rounded."""

    def __init__(
        self, collectives: Collectives, error: np.ndarray, exact: Callable[[np.ndarray, int], Request]
    ) -> None:
        """exact: `start` of what adds up the elements that are not rounded."""
        self._collectives, self._error, self._exact = collectives, error, exact

    def start(self, values: np.ndarray, begin: int) -> Request:
        if begin >= self._error.size:
            return self._exact(values, begin)
        return _Bucket(self._collectives, values, self._error[begin : begin + values.size])


class _Bucket:
    """On its way. Buckets are asked in order, so that all leaders issue their second collectives alike."""

    def __init__(self, collectives: Collectives, values: np.ndarray, error: np.ndarray) -> None:
        self._collectives, self._values, self._error = collectives, values, error
        hosts = collectives.size
        self._length = -(-values.size // hosts)  # of a slice; the last ones may be shorter, and end in zeros
        self._sent = np.zeros((hosts, self._length), np.uint16)
        self._received = np.empty_like(self._sent)
        round_off(values, self._sent.reshape(-1)[: values.size], error)
        self._request: Any = collectives.all_to_all(self._sent, self._received)
        self._gathering = False

    def Test(self) -> bool:
        if not self._request.Test():
            return False
        if not self._gathering:
            self._gather()
            return False
        widen(self._sent.reshape(-1)[: self._values.size], self._values)
        return True

    def _gather(self) -> None:
        """Add up this host's slice, and send it to all."""
        first = self._collectives.rank * self._length
        total, error = (array[first : first + self._length] for array in (self._values, self._error))
        widen(self._received[0, : total.size], total)
        part = np.empty_like(total)
        for row in self._received[1:, : total.size]:
            widen(row, part)
            with np.errstate(invalid="ignore"):  # infinities of either sign: the step is skipped
                total += part
        mine, left = np.zeros(self._length, np.uint16), np.zeros_like(total)
        round_off(total, mine[: total.size], left)
        error += left
        self._mine = mine
        self._request = self._collectives.all_gather(mine, self._sent)
        self._gathering = True


def round_off(values: np.ndarray, out: np.ndarray, error: np.ndarray) -> None:
    """out (uint16): the bits of values + error (float32) as bfloat16, ties to even. error: from now on what that leaves
    out; nothing in a stretch where not all is finite, whose step is skipped."""
    for at in range(0, values.size, _BLOCK):
        block = slice(at, at + _BLOCK)
        with np.errstate(invalid="ignore"):
            _round_block(values[block], out[block], error[block])


def _round_block(values: np.ndarray, out: np.ndarray, error: np.ndarray) -> None:
    wanted = values + error
    bits = wanted.view(np.uint32)
    # In integers: ml_dtypes takes ten times as long. A NaN's bits may overflow, so that way is for numbers only.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded &= np.uint32(0xFFFF0000)
    np.subtract(wanted, rounded.view(np.float32), out=error)
    if np.isfinite(error.sum()):
        out[...] = rounded >> 16
    else:
        out[...] = wanted.astype(ml_dtypes.bfloat16).view(np.uint16)
        error[...] = 0


def widen(bits: np.ndarray, out: np.ndarray) -> None:
    """out (float32) = bfloat16 of these bits (uint16)."""
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
