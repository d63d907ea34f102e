"""The number of threads of the OpenBLAS that NumPy brings.

OpenBLAS' threads wait for each other by spinning. On a busy machine, one of them that has lost its core holds up the
others for whole time slices, hundreds of times in a step: a run that takes 6 seconds takes minutes. So matmuls are cut
into pieces by `host_matmul`, whose threads sleep while they wait, and OpenBLAS computes each piece with one thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from wgrad.device.cores import affinity, ranks_on_this_host, share_of_cores
from wgrad.device.whole_numbers import whole_number

# Environment variables that set OpenBLAS' threads, the strongest first.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
_MAPS = Path("/proc/self/maps")
_shares: list[int] = []  # cores of this process, once the ranks of its host know each other


class _Threads:
    """Get and set the number of OpenBLAS' threads in this process."""

    def __init__(self, get: Callable[[], int], put: Callable[[int], object]) -> None:
        self._get, self._put = get, put
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1

    def get(self) -> int:
        with self._lock:
            return self._before if self._users else self._get()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Compute with one thread in here; threads of this process may be in here together."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = self._get()
                self._put(1)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._put(self._before)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS compute with one thread in here. Without OpenBLAS, nothing changes."""
    threads = _threads()
    if threads is None:
        yield
        return
    with threads.one():
        yield


@cache
def matmul_threads() -> int:
    """Return how many threads `host_matmul` computes with; 0: NumPy has no OpenBLAS, and its BLAS has its own."""
    threads = _threads()
    if threads is None:
        return 0
    # Until ranks know each other's, each is taken to be bound as this one.
    cores = _shares[-1] if _shares else share_of_cores(affinity(), [affinity()] * ranks_on_this_host())
    return chosen_threads(threads.get(), os.environ, cores)


def share_cores(ranks: Sequence[Collection[int]]) -> None:
    """Let matmuls take this rank's share of the cores.

    Args:
        ranks: The affinity of each rank on this host, including this one.
    """
    _shares[:] = [share_of_cores(affinity(), ranks)]
    matmul_threads.cache_clear()


def chosen_threads(available: int, environment: Mapping[str, str], cores: int) -> int:
    """Return how many threads matmuls should take.

    Args:
        available: OpenBLAS' own number. It follows the user's environment variables and the process' affinity.
        environment: Environment variables; a number that the user has set is taken as it is.
        cores: Cores that the process may use next to other ranks of its host.
    """
    set_by_user = any(whole_number(environment.get(name, "").strip()) is not None for name in _VARIABLES)
    return available if set_by_user else min(available, cores)


@cache
def _threads() -> _Threads | None:
    """Return the functions of the OpenBLAS that NumPy has loaded; None: it has another BLAS."""
    for file in _libraries():
        try:
            library = ctypes.CDLL(str(file))
        except OSError:
            continue
        for name in _NAMES:
            get, put = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                return _Threads(get, put)
    return None


def _libraries() -> list[Path]:
    """Return the loaded files that may be OpenBLAS: those next to NumPy, and on Linux a system's."""
    package = Path(np.__file__).parent
    found = [*package.parent.glob("numpy.libs/*openblas*"), *package.glob(".dylibs/*openblas*")]
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    loaded = dict.fromkeys(Path(line[line.index("/") :]) for line in lines if "openblas" in line and "/" in line)
    return list(loaded) or found
