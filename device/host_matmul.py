"""Matmuls of NumPy arrays on several threads that sleep while they wait for each other (device/openblas.py)."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache
from math import prod
from queue import SimpleQueue

import numpy as np

from wgrad.device.openblas import matmul_threads, one_blas_thread

_PIECE = 1 << 21  # multiplications of a piece at least: 50 us, about twice what waking a thread takes
_ALIGNED = 16  # rows and columns of a piece are a multiple: OpenBLAS' kernels compute so many at once
_SHORTEST = 32  # rows or columns of a piece, about
_Piece = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Job:
    """The pieces of one matmul. A thread that gets no core takes none."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = deque(pieces)
        self._left = len(pieces)
        self._lock, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Compute pieces while there are any."""
        while True:
            try:
                a, b, out = self._pieces.popleft()
            except IndexError:
                return
            try:
                np.matmul(a, b, out=out)
            except BaseException as error:
                self._error = error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._done.release()

    def wait(self) -> None:
        """Wait until all pieces are computed. Raises what one of them raised."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class _Helpers:
    """Threads that compute pieces of other threads' jobs. They start with the first job."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, name="wgrad-matmul", daemon=True).start()

    def _work(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                self._jobs.get().work()

    def compute(self, pieces: list[_Piece]) -> None:
        job = _Job(pieces)
        for _ in range(min(self._count, len(pieces) - 1)):
            if self._jobs.qsize() < self._count:  # else they get no core
                self._jobs.put(job)
        job.work()
        job.wait()


def host_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b for arrays of at least two axes.

    The last bits depend on the number of threads, as with OpenBLAS' own, but not on which thread computes what.
    """
    threads = matmul_threads()
    # Most matmuls are too small to cut, and found so without their shapes.
    if threads < 2 or max(a.size * b.shape[-1], b.size * a.shape[-2]) < 2 * _PIECE:
        with one_blas_thread():
            whole: np.ndarray = np.matmul(a, b)
        return whole
    leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    y = np.empty((*leading, a.shape[-2], b.shape[-1]), np.result_type(a, b))
    with one_blas_thread():
        _helpers(os.getpid(), threads - 1).compute(list(_pieces(a, b, y, threads)))
    return y


@cache
def _helpers(process: int, count: int) -> _Helpers:
    """Return the helping threads of this process: a fork has none of its parent's."""
    return _Helpers(count)


def _pieces(a: np.ndarray, b: np.ndarray, y: np.ndarray, most: int) -> Iterator[_Piece]:
    """Cut a matmul into at most `most` pieces: by its leading axes, or by the longer axis of the result."""
    leading, (rows, columns) = y.shape[:-2], y.shape[-2:]
    matrices, work = prod(leading), rows * columns * a.shape[-1]
    count = min(most, work // _PIECE, max(rows, columns) // _SHORTEST)
    if matrices >= most or matrices >= count:
        yield from _of_matrices(a, b, y, min(most, matrices, matrices * work // _PIECE))
        return
    ends = [round(max(rows, columns) * i / count / _ALIGNED) * _ALIGNED for i in range(count)]
    for start, end in zip(ends, [*ends[1:], None]):
        part = slice(start, end)
        if rows > columns:
            yield a[..., part, :], b, y[..., part, :]
        else:
            yield a, b[..., part], y[..., part]


def _of_matrices(a: np.ndarray, b: np.ndarray, y: np.ndarray, count: int) -> Iterator[_Piece]:
    """Cut by the first axis if it is long enough, else yield each matrix."""
    leading = y.shape[:-2]
    left, right = np.broadcast_to(a, (*leading, *a.shape[-2:])), np.broadcast_to(b, (*leading, *b.shape[-2:]))
    if leading[0] < count:
        for index in np.ndindex(leading):
            yield left[index], right[index], y[index]
        return
    ends = [leading[0] * i // count for i in range(count + 1)]
    for start, end in zip(ends, ends[1:]):
        yield left[start:end], right[start:end], y[start:end]
