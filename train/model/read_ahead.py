"""Reading of tensors ahead of their upload: the next pieces are read and checked while one is written to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from wgrad.train.files.safetensors_files import TensorEntry

# Measured with bench/bench_start.py: pieces of this size stay in the processor's cache until they are written.
PIECE_BYTES = 4 << 20
_READERS, _AHEAD = 2, 5  # threads, and pieces that are read ahead


def pieces(size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first element and the number of elements of each piece of a tensor."""
    step = PIECE_BYTES // itemsize
    for start in range(0, size, step):
        yield start, min(step, size - start)


def read_ahead(tensors: Iterable[tuple[TensorEntry, np.dtype]]) -> Generator[np.ndarray]:
    """Yield all pieces of the tensors, flat, in their dtypes. A piece is valid until the next one is requested.

    Args:
        tensors: Entries whose `begin` is not None, each with its dtype.

    Raises:
        WgradError: The next piece cannot be read or is not finite.
    """
    buffers = [np.empty(PIECE_BYTES, np.uint8) for _ in range(_AHEAD + 1)]

    def read(entry: TensorEntry, start: int, out: np.ndarray) -> np.ndarray:
        entry.read_into(out, start)
        return out

    with ThreadPoolExecutor(_READERS, "read-ahead") as threads:
        waiting: deque[Future[np.ndarray]] = deque()
        number = 0
        for entry, dtype in tensors:
            for start, count in pieces(int(np.prod(entry.shape)), dtype.itemsize):
                out = buffers[number % len(buffers)][: count * dtype.itemsize].view(dtype)
                waiting.append(threads.submit(read, entry, start, out))
                number += 1
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
