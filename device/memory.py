"""Device memory from a pool of size classes, and the arrays that live in them."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from wgrad.device.errors import OutOfMemory
from wgrad.device.placement import Placement, Rehearsal, place

ALIGN = 256  # bytes; what hipMalloc aligns to, and the default alignment of a storage binding's offset in WebGPU
_CLASSES_PER_DOUBLING = 8  # at most 12.5 % of a block is padding
_REUSE_SLACK = 1.125  # a free block this much larger than asked for is taken rather than a new one made


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of a device's memory pool. `fragmentation` = 1 - largest free block / free bytes (0 when none is free)."""

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    fragmentation: float = 0.0


def size_class(nbytes: int) -> int:
    """Bytes of the block that holds nbytes."""
    nbytes = max(nbytes, ALIGN)
    step = max(ALIGN, (1 << nbytes.bit_length() - 1) // _CLASSES_PER_DOUBLING)
    return (nbytes + step - 1) // step * step


class Block:
    """One allocation of the pool; `buffer` is what the driver calls it: an address, or an object of its library."""

    __slots__ = ("buffer", "nbytes", "serial", "scratch")

    def __init__(self, buffer: Any, nbytes: int, serial: int) -> None:
        self.buffer, self.nbytes, self.serial = buffer, nbytes, serial
        self.scratch = 0  # recordings that it belongs to: only given out while one is recorded, or `borrowing`


class Lease:
    """A block in use; when the last array on it goes, the block returns to the pool."""

    __slots__ = ("block", "_pool", "__weakref__")

    def __init__(self, block: Block, pool: Pool) -> None:
        self.block, self._pool = block, pool

    def of(self, pool: Pool) -> bool:
        return self._pool is pool

    def is_scratch(self) -> bool:
        """While recording: was this allocated inside the recording?"""
        return self._pool.is_scratch(self)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At Python's end what a module has imported may be gone before this, and nobody needs the block.
        if not _ending():
            self._pool._release(self.block)


@cache
def _name_of(dtype: np.dtype) -> str:
    """NumPy works it out anew each time, which takes longer than all else that a launch asks of a dtype."""
    return dtype.name


class Array:
    """A row-major array on the device: a shape and dtype over (part of) a leased block."""

    __slots__ = ("lease", "offset", "shape", "dtype", "size", "nbytes")

    def __init__(self, lease: Lease, offset: int, shape: Sequence[int], dtype: Any) -> None:
        self.lease = lease
        self.offset = offset  # bytes
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Address of the first element, on devices with addresses (HIP)."""
        return int(self.lease.block.buffer) + self.offset

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype_name(self) -> str:
        return _name_of(self.dtype)

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype={self.dtype})"


class _Placed:
    """A placement as far as the recording that it is of has come. blocks: those that there are, by their numbers."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.blocks = placement, dict[int, Block]()
        self._turn = 0

    def next(self, wanted: int) -> int | None:
        """The number of the next array's block. None: it was not to ask for so much."""
        turn, self._turn = self._turn, self._turn + 1
        as_rehearsed = self.placement.wanted[turn : turn + 1] == [wanted]
        return self.placement.block_of[turn] if as_rehearsed else None


class Pool:
    """Blocks by size; freed blocks are reused in order of size, and given back to the driver only by `trim`."""

    def __init__(self, create: Callable[[int], Any], destroy: Callable[[Block], None], *, exact: bool = False) -> None:
        """exact: a block is as large as its array (in multiples of 16 bytes), so that a guarded memory behind it
        sees every access past an array's end; for tests."""
        self._create, self._destroy, self._exact = create, destroy, exact
        self._free: list[tuple[int, int, Block]] = []  # (nbytes, serial, block), sorted
        self._scratch: list[tuple[int, int, Block]] = []
        # Every block there is. Without this a block held only by a cycle of Python objects would lose its buffer when
        # the cycle is collected (all finalisers of a cycle run), and come back from its Lease without one.
        self._blocks: set[Block] = set()
        self._serial = 0
        self._touched: set[Block] | None = None
        self.rehearsal: Rehearsal | None = None  # is told of every block that is taken and returned
        self._placed: _Placed | None = None
        self._forgot = False  # there may be blocks among `_scratch` that are free for all again
        self.borrowing = False  # what recordings keep for their replays is given out: none runs meanwhile
        self.limit: int | None = None  # bytes that all blocks together may have
        # Called where there is no memory: lets arrays go that are kept for speed alone. False: there were none.
        self.spare: Callable[[], bool] = lambda: False
        self.in_use_bytes = self.peak_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, nbytes: int) -> Lease:
        wanted = max(16, (nbytes + 15) // 16 * 16) if self._exact else size_class(nbytes)
        self._free_forgotten()
        block = self._as_rehearsed(wanted)
        try:
            block = block or self._find(wanted)
        except OutOfMemory:
            if not self.spare():
                raise
            block = self._find(wanted)
        if self.rehearsal is not None:
            self.rehearsal.taken(block, wanted)
        if self._touched is not None:
            self._touched.add(block)
        self.in_use_bytes += block.nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return Lease(block, self)

    def _find(self, wanted: int) -> Block:
        block = self._take(self._scratch, wanted) if self._may_use_scratch() else None
        return block or self._take(self._free, wanted) or self._within_limit(wanted) or self._new(wanted)

    def _may_use_scratch(self) -> bool:
        return self.borrowing or self._touched is not None

    def _within_limit(self, wanted: int) -> Block | None:
        """Make room below the limit for `wanted` more bytes: free blocks go. Where that is not enough, a free block of
        the recordings is lent, however large. OutOfMemory where there is none. None: a new block may be made."""
        if self.limit is None or self.reserved_bytes + wanted <= self.limit:
            return None
        self.trim()
        if self.reserved_bytes + wanted <= self.limit:
            return None
        slack = math.inf
        lent = self._take(self._scratch, wanted, slack) if self._may_use_scratch() else None
        lent = lent or self._take(self._free, wanted, slack)
        if lent is None:
            raise OutOfMemory(
                f"the memory limit of {self.limit:,} bytes leaves no room for {wanted:,} more: {self.in_use_bytes:,} "
                f"are in use, {self.reserved_bytes:,} reserved"
            )
        return lent

    def _take(self, free: list[tuple[int, int, Block]], wanted: int, slack: float = _REUSE_SLACK) -> Block | None:
        at = bisect_left(free, (wanted, -1))
        most = wanted if self._exact else max(wanted * slack, 4096)
        if at < len(free):
            entry = free.pop(at)  # looked at when it is out: a collection may have put another into its place
            if wanted <= entry[0] <= most:
                return entry[2]
            insort(free, entry)
        return None

    def _as_rehearsed(self, wanted: int) -> Block | None:
        """The block that the placement of a rehearsed recording has for its next array. None: that asks for something
        else than was rehearsed, the block is in use for longer than it was, or there is no room for it."""
        placed = self._placed
        number = None if placed is None else placed.next(wanted)
        if placed is None or number is None:
            return None
        if number in placed.blocks:
            return self._take_back(placed.blocks[number])
        block = self._make(placed.placement.sizes[number], placed)
        if block is not None:
            placed.blocks[number] = block
        return block

    def _take_back(self, block: Block) -> Block | None:
        """This block, if it is free."""
        free = self._scratch if block.scratch else self._free
        at = bisect_left(free, (block.nbytes, block.serial))
        if at < len(free):
            entry = free.pop(at)
            if entry[2] is block:
                return block
            insort(free, entry)
        return None

    def _make(self, nbytes: int, placed: _Placed) -> Block | None:
        """A block of exactly so many bytes: one that is free and not of the placement, or a new one."""
        used = set(placed.blocks.values())
        for free in (self._scratch, self._free):
            found = next((block for size, _, block in list(free) if size == nbytes and block not in used), None)
            if found is not None and (block := self._take_back(found)) is not None:
                return block
        if self.limit is not None and self.reserved_bytes + nbytes > self.limit:
            self.trim()
            if self.reserved_bytes + nbytes > self.limit:
                return None
        try:
            return self._new(nbytes)
        except OutOfMemory:
            return None

    def _new(self, nbytes: int) -> Block:
        try:
            buffer = self._create(nbytes)
        except OutOfMemory:
            if not self.trim():
                raise
            buffer = self._create(nbytes)
        self._serial += 1
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(buffer, nbytes, self._serial)
        self._blocks.add(block)
        return block

    def _release(self, block: Block) -> None:
        self.in_use_bytes -= block.nbytes
        if self.rehearsal is not None:
            self.rehearsal.returned(block)
        insort(self._scratch if block.scratch else self._free, (block.nbytes, block.serial, block))

    def trim(self) -> int:
        """Give all free blocks back to the driver (those of replays, and of a recording under way, excepted); returns
        the bytes."""
        # A garbage collection during `_destroy` may bring blocks back, or trim again: the list is taken away first, and
        # each block is counted off as it goes. What an error keeps from going is free as before.
        self._free_forgotten()
        touched = self._touched or set()
        going, self._free = (
            [entry for entry in self._free if entry[2] not in touched],
            [entry for entry in self._free if entry[2] in touched],
        )
        freed = 0
        try:
            while going:
                nbytes, _, block = going.pop()
                self._blocks.discard(block)
                self.reserved_bytes -= nbytes
                freed += nbytes
                self._destroy(block)
        finally:
            for entry in going:
                insort(self._free, entry)
        return freed

    def is_scratch(self, lease: Lease) -> bool:
        """While recording: was this allocated inside the recording?"""
        return self._touched is not None and lease.block in self._touched

    def begin_capture(self, rehearsal: Rehearsal | None = None) -> None:
        """rehearsal: of the same work, whose arrays then lie where `placement.place` puts them."""
        self._touched = set()
        self._placed = None if rehearsal is None else _Placed(place(rehearsal))

    def end_capture(self) -> set[Block]:
        """Blocks used while recording are scratch from now on, until `forget` is given them: a replay writes to them,
        nobody else may hold them."""
        touched, self._touched = self._touched or set(), None
        self._placed = None
        for block in touched:
            block.scratch += 1
        for entry in [e for e in self._free if e[2].scratch]:
            self._free.remove(entry)
            insort(self._scratch, entry)
        return touched

    def forget(self, touched: set[Block]) -> None:
        """The recording with these blocks is gone. May be called at any time, by a collection too."""
        for block in touched:
            block.scratch -= 1
        self._forgot = True

    def _free_forgotten(self) -> None:
        if self._forgot:
            self._forgot = False
            for entry in [e for e in self._scratch if not e[2].scratch]:
                self._scratch.remove(entry)
                insort(self._free, entry)

    def statistics(self) -> MemoryStats:
        return MemoryStats(
            self.in_use_bytes, self.peak_bytes, self.reserved_bytes, self.peak_reserved_bytes, self.fragmentation
        )

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak_reserved_bytes = self.in_use_bytes, self.reserved_bytes

    @property
    def free_bytes(self) -> int:
        return sum(e[0] for e in self._free) + sum(e[0] for e in self._scratch)

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        free = self.free_bytes
        largest = max((e[-1][0] for e in (self._free, self._scratch) if e), default=0)
        return 1.0 - largest / free if free else 0.0
