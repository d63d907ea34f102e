"""Memory that the ranks of a host share: what each has of an array, and the sum of all."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np

from wgrad.device.main_memory import free_memory

_LINE = 64  # bytes that a processor moves at once: what one rank writes shares none with what another does
_TOKEN_BYTES = 16


class HostMemory:
    """Each rank's part of an array, the sum of all, and how far each rank is with which bucket.

    rank: of this process among the `ranks` of the host. parts: float32 [ranks, size]; total: float32 [size], of a rank
    alone its part itself. given, summed: int64 [ranks, buckets], done: int64 [buckets]: in which round last.
    """

    def __init__(self, buffer: Any, rank: int, ranks: int, size: int, buckets: int) -> None:
        """buffer: `nbytes` of them, zeros at first."""
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
        """Memory fence: earlier writes become visible to others before later ones; likewise reads.

        Python has no such instruction; a lock that is left and taken again has. (x86 keeps the order by itself.)
        """
        for _ in range(2):
            with self._lock:
                pass


def private_memory(size: int, buckets: int) -> HostMemory:
    """Host memory of a rank that shares none."""
    return HostMemory(bytearray(nbytes(1, size, buckets)), 0, 1, size, buckets)


def nbytes(ranks: int, size: int, buckets: int) -> int:
    return _flag_bytes(ranks, buckets) + 4 * _floats(size) * (ranks + (ranks > 1))


def _row(buckets: int) -> int:
    return -(-buckets * 8 // _LINE) * _LINE // 8


def _floats(size: int) -> int:
    return -(-size * 4 // _LINE) * _LINE // 4


def _flag_bytes(ranks: int, buckets: int) -> int:
    return _LINE + (2 * ranks + 1) * _row(buckets) * 8  # the first line has the token


class Segment:
    """Memory of one process that others of its host can open: without a name, so that nothing is left of it however
    they end, and not of /dev/shm, which a container may have little of.

    OSError where the system has no such memory, or not as much.
    """

    def __init__(self, nbytes: int) -> None:
        make = getattr(os, "memfd_create", None)
        if make is None:
            raise OSError("this system has no memfd_create")
        free = free_memory()
        if free is not None and nbytes > free:  # the system would rather end processes than refuse it
            raise OSError(f"{nbytes / 2**20:,.0f} MiB are needed, and {free / 2**20:,.0f} are free")
        self._file: int = make("wgrad")
        try:
            os.posix_fallocate(self._file, 0, nbytes)  # now, and not by a fault where it is first touched
            self.buffer = mmap.mmap(self._file, nbytes)
        except OSError:
            os.close(self._file)
            raise
        token = os.urandom(_TOKEN_BYTES)
        self.buffer[:_TOKEN_BYTES] = token
        self.address = (os.getpid(), self._file, nbytes, token)

    def close(self) -> None:
        """No more processes will open it. What is mapped stays."""
        os.close(self._file)


def open_segment(address: tuple[int, int, int, bytes]) -> mmap.mmap:
    """OSError where that process and this one do not see the same memory."""
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
