"""Memory whose ends touch pages that nobody may read or write: a stray access faults."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

GUARD = 1 << 20  # bytes that cannot be accessed, on both sides
_BESIDE = 0xA5  # fills what lies between the data and the page's ends
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """`nbytes` at `address`, which end where memory ends, but for what alignment asks. fill: a byte.

    Raises:
        MemoryError: the system gives no more.
    """

    def __init__(self, nbytes: int, align: int = 16, fill: int = 0) -> None:
        self.nbytes = nbytes
        body = max(mmap.PAGESIZE, -(-(nbytes + align) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.total = body + 2 * GUARD
        self.start: int = _libc.mmap(None, self.total, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self.start == ctypes.c_void_p(-1).value or _libc.mprotect(self.start + GUARD, body, _READ_WRITE):
            raise MemoryError(f"no guarded memory for {nbytes:,} bytes")
        end = self.start + GUARD + body
        self.address = (end - nbytes) & ~(align - 1)
        self._before = self.start + GUARD, self.address - self.start - GUARD
        self._behind = self.address + nbytes, end - self.address - nbytes
        ctypes.memset(self.start + GUARD, _BESIDE, body)
        ctypes.memset(self.address, fill, nbytes)

    def view(self, dtype: Any = np.uint8) -> np.ndarray:
        """The data, as an array that shares its memory."""
        return np.frombuffer(memoryview((ctypes.c_char * self.nbytes).from_address(self.address)), dtype)

    def holds(self, address: int) -> bool:
        """Return whether this is an address of the data or its guards."""
        return self.start <= address < self.start + self.total

    def untouched(self) -> bool:
        """Return whether the few bytes next to the data, which no guard covers, are unchanged."""
        return all(set(ctypes.string_at(at, n)) <= {_BESIDE} for at, n in (self._before, self._behind))

    def free(self) -> None:
        _libc.munmap(self.start, self.total)
