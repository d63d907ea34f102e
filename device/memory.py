"""A pool of device memory with size classes, and the arrays in it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from wgrad.device.errors import OutOfMemory
from wgrad.device.placement import Placement, Rehearsal, place

ALIGN = 256  # bytes; alignment of hipMalloc, and the default for offsets of storage bindings in WebGPU
_CLASSES_PER_DOUBLING = 8  # at most 12.5 % of a block is padding
_REUSE_SLACK = 1.125  # a free block up to this much larger than requested is preferred to a new one


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of a device's memory pool. `fragmentation` = 1 - largest free block / free bytes (0 when none is free)."""

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    fragmentation: float = 0.0


@lru_cache(1 << 12)
def size_class(nbytes: int) -> int:
    """Return the bytes of the block for an array of nbytes."""
    nbytes = max(nbytes, ALIGN)
    step = max(ALIGN, (1 << nbytes.bit_length() - 1) // _CLASSES_PER_DOUBLING)
    return (nbytes + step - 1) // step * step


class Block:
    """One allocation of the pool. buffer: its address, or an object of the driver's library."""

    __slots__ = ("buffer", "nbytes", "serial", "scratch")

    def __init__(self, buffer: Any, nbytes: int, serial: int) -> None:
        self.buffer, self.nbytes, self.serial = buffer, nbytes, serial
        self.scratch = 0  # number of recordings that use it: it is only given out while recording or `borrowing`


class Lease:
    """A block in use; it returns to the pool when the last array in it is gone."""

    __slots__ = ("block", "_pool", "__weakref__")

    def __init__(self, block: Block, pool: Pool) -> None:
        self.block, self._pool = block, pool

    def of(self, pool: Pool) -> bool:
        return self._pool is pool

    def is_scratch(self) -> bool:
        """Return whether this was allocated within the current recording."""
        return self._pool.is_scratch(self)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python ends, imported modules may be gone before this, and the block is no longer needed.
        if not _ending():
            self._pool._release(self.block)


@cache
def _name_of(dtype: np.dtype) -> str:
    """Return the name of a dtype, which NumPy would compute slowly each time."""
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
    """The state of a placement during its recording. blocks: those that exist already, by number."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.blocks = placement, dict[int, Block]()
        self._turn = 0

    def copy(self) -> _Placed:
        copied = _Placed(self.placement)
        copied.blocks, copied._turn = self.blocks.copy(), self._turn
        return copied

    def next(self, wanted: int) -> int | None:
        """Return the number of the next array's block; None if the rehearsal had no such array here.

        What the rehearsal left behind is passed over, since values that it cached are not computed again; and one
        other array, in whose place there may be one of another size.
        """
        placement, passed = self.placement, 0
        for turn in range(self._turn, len(placement.wanted)):
            if placement.wanted[turn] == wanted:
                self._turn = turn + 1
                return placement.block_of[turn]
            passed += not placement.left[turn]
            if passed > 1:
                break
        return None


class Pool:
    """Blocks by size. Freed blocks are reused, the smallest that fits first, and returned to the driver by `trim`."""

    def __init__(self, create: Callable[[int], Any], destroy: Callable[[Block], None], *, exact: bool = False) -> None:
        """exact: make blocks as large as their arrays (in multiples of 16 bytes), so that guard memory after them
        detects every access past an array's end; for tests."""
        self._create, self._destroy, self._exact = create, destroy, exact
        self._free: list[tuple[int, int, Block]] = []  # (nbytes, serial, block), sorted
        self._scratch: list[tuple[int, int, Block]] = []
        # All blocks. Without this, a block held only by a cycle of Python objects would lose its buffer when the cycle
        # is collected (all finalizers of a cycle run), and its Lease would return it without one.
        self._blocks: set[Block] = set()
        self._serial = 0
        self._touched: set[Block] | None = None
        self.rehearsal: Rehearsal | None = None  # notified of every block that is taken or returned
        self.trace: Any = None  # notified, too (repeats.py)
        self._placed: _Placed | None = None
        self._forgot = False  # whether blocks in `_scratch` may have become free for general use
        self.borrowing = False  # whether scratch of recordings is given out; none may run meanwhile
        self.limit: int | None = None  # most bytes of all blocks together
        # Called when memory is short: frees arrays that are only kept for speed. Returns False if there were none.
        self.spare: Callable[[], bool] = lambda: False
        self.in_use_bytes = self.peak_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, nbytes: int) -> Lease:
        wanted = max(16, (nbytes + 15) // 16 * 16) if self._exact else size_class(nbytes)
        if self._forgot:
            self._free_forgotten()
        block = None if self._placed is None else self._as_rehearsed(self._placed, wanted)
        try:
            block = block or self._find(wanted)
        except OutOfMemory:
            if not self.spare():
                raise
            if self.rehearsal is not None:
                self.rehearsal.spared = True
            block = self._find(wanted)
        if self.rehearsal is not None:
            self.rehearsal.taken(block, wanted)
        if self.trace is not None:
            self.trace.taken(block, wanted)
        if self._touched is not None:
            self._touched.add(block)
        self.in_use_bytes += block.nbytes
        if self.in_use_bytes > self.peak_bytes:
            self.peak_bytes = self.in_use_bytes
        return Lease(block, self)

    def _find(self, wanted: int) -> Block:
        block = self._take(self._scratch, wanted) if self._may_use_scratch() else None
        return block or self._take(self._free, wanted) or self._within_limit(wanted) or self._new(wanted)

    def _may_use_scratch(self) -> bool:
        return self.borrowing or self._touched is not None

    def _within_limit(self, wanted: int) -> Block | None:
        """Make room below the limit for `wanted` more bytes by freeing blocks; return None if a new one may be made.
        If that is not enough, return a free block of the recordings, however large. Raises OutOfMemory without one."""
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
        if at < len(free) and free[at][0] <= most:
            entry = free.pop(at)  # checked after removal: a garbage collection may have changed the list
            if wanted <= entry[0] <= most:
                return entry[2]
            insort(free, entry)
        return None

    def _as_rehearsed(self, placed: _Placed, wanted: int) -> Block | None:
        """Return the block of a rehearsed recording's placement for the next array. None: the array differs from the
        rehearsal, the block is in use for longer than there, or there is no room for it."""
        if (number := placed.next(wanted)) is None:
            return None
        if number in placed.blocks:
            return self._take_back(placed.blocks[number])
        block = self._make(placed.placement.sizes[number], placed)
        if block is not None:
            placed.blocks[number] = block
        return block

    def _take_back(self, block: Block) -> Block | None:
        """Take this block if it is free; else return None."""
        free = self._scratch if block.scratch else self._free
        at = bisect_left(free, (block.nbytes, block.serial))
        if at < len(free):
            entry = free.pop(at)
            if entry[2] is block:
                return block
            insort(free, entry)
        return None

    def _make(self, nbytes: int, placed: _Placed) -> Block | None:
        """Return a block of exactly `nbytes`: a free one that is not in the placement, or a new one."""
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
        if self.trace is not None:
            self.trace.returned(block)
        insort(self._scratch if block.scratch else self._free, (block.nbytes, block.serial, block))

    def trim(self) -> int:
        """Return all free blocks to the driver, except those of replays and a current recording; return the bytes."""
        # A garbage collection during `_destroy` may return blocks, or trim again: so the list is replaced first, and
        # each block is discounted as it is destroyed. After an error the rest are free as before.
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
        """Return whether this was allocated within the current recording."""
        return self._touched is not None and lease.block in self._touched

    def begin_capture(self, rehearsal: Rehearsal | None = None) -> None:
        """Begin a recording. rehearsal: of the same work, whose arrays are then placed by `placement.place`."""
        self._touched = set()
        self._placed = None if rehearsal is None else _Placed(place(rehearsal))

    def end_capture(self) -> set[Block]:
        """End a recording, and return its blocks. They are scratch until `forget`: replays write to them, and no array
        may use them."""
        touched, self._touched = self._touched or set(), None
        self._placed = None
        for block in touched:
            block.scratch += 1
        for entry in [e for e in self._free if e[2].scratch]:
            self._free.remove(entry)
            insort(self._scratch, entry)
        return touched

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs. The pool destroys nothing: it is that of a dry run."""
        placed = self._placed
        return {
            **vars(self),
            "_free": self._free.copy(),
            "_scratch": self._scratch.copy(),
            "_blocks": self._blocks.copy(),
            "_touched": None if self._touched is None else self._touched.copy(),
            "_placed": None if placed is None else placed.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a state with the same blocks in use."""
        vars(self).update(state)

    def forget(self, touched: set[Block]) -> None:
        """Release the blocks of a deleted recording. May be called at any time, even by a garbage collection."""
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
