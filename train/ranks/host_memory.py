"""Memory that the ranks of a host share: each rank's part of a sum, and the total."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np

from wgrad.device.main_memory import free_memory

_LINE = 64  # bytes of a cache line; no two ranks write to the same line
_TOKEN_BYTES = 16


class HostMemory:
    """Each rank's part of a sum, the total, and the progress of each rank.

    Args:
        buffer: `nbytes` bytes, all zero at first.
        rank: Number of this rank on the host.
        ranks: Ranks on the host.
        size: Elements of the sum.
        buckets: Number of buckets.

    Attributes:
        parts: float32 [ranks, size].
        total: float32 [size]; with one rank, its part.
        given, summed: int64 [ranks, buckets], the last round in which a rank has given or summed a bucket.
        done: int64 [buckets], the last round in which a bucket was summed between hosts.
    """

    def __init__(self, buffer: Any, rank: int, ranks: int, size: int, buckets: int) -> None:
        self.rank, self.ranks, self._buffer = rank, ranks, buffer
        row = _row(buckets)
        flags = np.frombuffer(buffer, np.int64, (2 * ranks + 1) * row, _LINE).reshape(2 * ranks + 1, row)[:, :buckets]
        self.given, self.summed, self.done = flags[:ranks], flags[ranks : 2 * ranks], flags[2 * ranks]
        row = _floats(size)
        rows = ranks + (ranks > 1)
        floats = np.frombuffer(buffer, np.float32, rows * row, _flag_bytes(ranks, buckets)).reshape(rows, row)
        self.parts, self.total = floats[:ranks, :size], floats[-1, :size]
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Make earlier writes visible to others before later ones, and likewise for reads.

        Python has no memory fence, but acquiring a lock includes one. (x86 keeps the order by itself.)
        """
        for _ in range(2):
            with self._lock:
                pass


def private_memory(size: int, buckets: int) -> HostMemory:
    """Return the memory of a rank that shares none."""
    return HostMemory(bytearray(nbytes(1, size, buckets)), 0, 1, size, buckets)


def nbytes(ranks: int, size: int, buckets: int) -> int:
    """Return the bytes of a `HostMemory`."""
    return _flag_bytes(ranks, buckets) + 4 * _floats(size) * (ranks + (ranks > 1))


def _row(buckets: int) -> int:
    return -(-buckets * 8 // _LINE) * _LINE // 8


def _floats(size: int) -> int:
    return -(-size * 4 // _LINE) * _LINE // 4


def _flag_bytes(ranks: int, buckets: int) -> int:
    return _LINE + (2 * ranks + 1) * _row(buckets) * 8  # the first line has the token


class Segment:
    """Memory of one process that other processes of its host can open.

    It has no name, so that nothing is left behind however they end, and is not in /dev/shm, which is small in many
    containers. Raises OSError if the system has no such memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        make = getattr(os, "memfd_create", None)
        if make is None:
            raise OSError("this system has no memfd_create")
        free = free_memory()
        if free is not None and nbytes > free:  # the system would kill processes rather than refuse it
            raise OSError(f"{nbytes / 2**20:,.0f} MiB are needed, and {free / 2**20:,.0f} are free")
        self._file: int = make("wgrad")
        try:
            os.posix_fallocate(self._file, 0, nbytes)  # allocate now, not by a fault at first use
            self.buffer = mmap.mmap(self._file, nbytes)
        except OSError:
            os.close(self._file)
            raise
        token = os.urandom(_TOKEN_BYTES)
        self.buffer[:_TOKEN_BYTES] = token
        self.address = (os.getpid(), self._file, nbytes, token)

    def close(self) -> None:
        """Prevent more processes from opening it. Existing mappings stay."""
        os.close(self._file)


def open_segment(address: tuple[int, int, int, bytes]) -> mmap.mmap:
    """Map the segment of another process. OSError: the two processes do not see the same memory."""
    process, file, nbytes, token = address
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {process} is not the rank that it should be")
        buffer = mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)
    if buffer[:_TOKEN_BYTES] != token:
        raise OSError(f"process {process} is not the rank that it should be")
    return buffer
