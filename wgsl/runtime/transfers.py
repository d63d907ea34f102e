"""Copies between device and host memory that overlap with large launches, in pieces.

Copy commands do not overlap with a queue's other work. But of two launches without a barrier between them, the second
begins while the first still runs. So a launch of few workgroups (transfer.wgsl) copies a piece of an array right before
a large launch. Both open a submission: wgpu puts the barriers of buffers that a submission uses for the first time
before all of it, and those of buffers that it uses again before the launch that does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from wgrad.device.memory import ALIGN, Array, Block, Lease
from wgrad.wgsl.runtime.compile import Variant

SHADER = Variant("transfer", "main", ())
UNIT = 16  # bytes that are copied at once
LEAST_WORK = 2e10  # FLOP of a launch that a copy may overlap with: 0.1 ms on a large GPU
_PASS = 256 * 8 * UNIT  # bytes per iteration of a workgroup


@dataclass(frozen=True)
class _Way:
    """groups: workgroups of the copy. bytes_per_flop: per FLOP of the other launch, so that both end together."""

    groups: int
    bytes_per_flop: float


# Measured on an H200 and H100s (bench/notes/copies.md), next to matmuls of 280 to 306 TFLOP/s.
_TO_HOST = _Way(2, 37e9 / 280e12)
_FROM_HOST = _Way(5, 36e9 / 280e12)
# For copies from host memory that are not done when needed, because they take longer than the launches they overlap
# with: this slows each launch, but takes less time in total (bench/notes/copies.md).
_FROM_HOST_BEHIND = _Way(8, 50e9 / 280e12)
_LATE, _OLDER = 0.25, 0.9  # share that was left when needed, above which that is used; weight of older copies
BYTES_PER_FLOP = min(_TO_HOST.bytes_per_flop, _FROM_HOST.bytes_per_flop)


class _Borrowed(Lease):
    """Lease of a block with a pending copy, which does not keep the block from its pool.

    The next user of the block completes the copy first, so that pending copies take no memory.
    """

    __slots__ = ()

    def __init__(self, block: Block) -> None:
        self.block = block

    def __del__(self, *_: object) -> None:
        pass


def in_pieces(src: Array, out: Array) -> bool:
    """Return whether a copy of whole arrays can be split into pieces."""
    return src.nbytes > 0 and not (src.nbytes % UNIT or src.offset % ALIGN or out.offset % ALIGN)


class _Transfer:
    def __init__(self, src: Array, out: Array, to_host: bool) -> None:
        self.to_host, self.nbytes, self.left = to_host, src.nbytes, src.nbytes
        self.blocks = {src.lease.block, out.lease.block}
        self._src, self._out = self._borrow(src), self._borrow(out)

    @staticmethod
    def _borrow(array: Array) -> Array:
        return Array(_Borrowed(array.lease.block), array.offset, (array.nbytes,), np.uint8)

    def take(self, nbytes: int) -> tuple[Array, Array]:
        """The next bytes of both arrays, at most so many as are left."""
        at = self._src.nbytes - self.left
        nbytes = min(nbytes, self.left)
        self.left -= nbytes
        src, out = (Array(a.lease, a.offset + at, (nbytes,), a.dtype) for a in (self._src, self._out))
        return src, out


class Transfers:
    """Pending copies in their order. most_bytes: of a piece."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # Of copies from host memory that had launches to overlap with: bytes, and bytes left when they were needed.
        self._from_host = self._late = 0.0
        self._waiting: deque[_Transfer] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, src: Array, out: Array, *, to_host: bool) -> None:
        """Split a copy that `in_pieces` accepts."""
        self._waiting.append(_Transfer(src, out, to_host))

    def _way(self, transfer: _Transfer) -> _Way:
        if transfer.to_host:
            return _TO_HOST
        return _FROM_HOST_BEHIND if self._late > _LATE * self._from_host else _FROM_HOST

    def _count(self, transfer: _Transfer) -> None:
        """Count a copy that is done, or needed now."""
        if not transfer.to_host and transfer.left < transfer.nbytes:
            self._from_host = _OLDER * self._from_host + transfer.nbytes
            self._late = _OLDER * self._late + transfer.left

    def due(self, blocks: Collection[Block] | None = None) -> Iterator[tuple[Array, Array]]:
        """Take the rest of all pending copies, or of those up to the last that touches one of these blocks."""
        count = max((n for n, t in enumerate(self._waiting, 1) if blocks is None or t.blocks & set(blocks)), default=0)
        for _ in range(count):
            transfer = self._waiting.popleft()
            self._count(transfer)
            yield transfer.take(transfer.left)

    def beside(self, work: float) -> Iterator[tuple[Array, Array, int]]:
        """Take (from, to, workgroups) of the pieces that overlap with a launch of so many FLOP."""
        share = 1.0  # of the launch's time
        while self._waiting and work >= LEAST_WORK:
            transfer = self._waiting[0]
            way = self._way(transfer)
            whole = work * way.bytes_per_flop
            nbytes = min(transfer.left, min(int(share * whole), self._most_bytes) // _PASS * _PASS)
            if nbytes <= 0:
                return
            share -= nbytes / whole
            yield *transfer.take(nbytes), way.groups
            if not transfer.left:
                self._count(self._waiting.popleft())
