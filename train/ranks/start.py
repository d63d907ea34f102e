"""Find the ranks of a run: those that mpirun or srun started, or this process alone."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from wgrad.device.cores import ranks_on_this_host
from wgrad.device.errors import WgradError
from wgrad.device.whole_numbers import whole_number
from wgrad.train.ranks import keeper
from wgrad.train.ranks.world import RankFailure, World

# Environment variables of Open MPI, MVAPICH, MPICH and others, and Slurm's srun: number of processes, and this one's.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LAUNCHER = "WGRAD_LAUNCHER"  # environment variable: host and process id of the command with --ranks
START_LIMIT = 60.0  # seconds until all ranks have found each other
INSTALL = "pip install 'wgrad[mpi]', or mpi4py for the installed MPI"


def ranks_started(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started, including this one; 1 without a launcher."""
    return max((whole_number(environment.get(name, "")) or 1 for name in _SIZES), default=1)


@contextmanager
def open_world(tell: Callable[[str, int], None] | None = None) -> Iterator[World]:
    """Yield the ranks of the run.

    tell: prints message and status of a RankFailure, on the rank that says it, before MPI ends: a launcher ends all
        ranks when the first one exits. None: the caller does.

    Raises:
        WgradError: A launcher has started several, but MPI cannot join them.
    """
    started = ranks_started()
    if started <= 1:
        yield World()
        return
    with watching(started) as watchdog:
        watchdog.joining()
        world = _join(started)
        watchdog.joined()
        try:
            yield world
        except RankFailure as failure:
            if failure.said and tell is not None:
                failure.said = False
                tell(str(failure), failure.status)
            raise
        finally:
            world.close()


@contextmanager
def watching(started: int | None = None) -> Iterator[Watchdog]:
    """Run the watchdog of this rank in here, if a launcher has started several and none runs yet.

    It notices the death of another rank sooner if it starts before slow imports.

    Args:
        started: Number of ranks, if known.
    """
    started = ranks_started() if started is None else started
    if _watchdogs or started <= 1:
        yield _watchdogs[-1] if _watchdogs else Watchdog()
        return
    watchdog = _LimitOfStart(started) if sys.platform == "win32" else _Keeper(started)
    _watchdogs.append(watchdog)
    try:
        yield watchdog
    finally:
        _watchdogs.clear()
        watchdog.close()


class Watchdog:
    """Ends this process if MPI does not start. This one does nothing: the process is alone."""

    def __init__(self, started: int = 1) -> None:
        """started: Number of ranks."""

    def joining(self) -> None:
        """Tell that MPI starts."""

    def joined(self) -> None:
        """Tell that MPI has started."""

    def close(self) -> None:
        """End the watch."""


class _LimitOfStart(Watchdog):
    """A limit of MPI's start alone: on Windows, no signal reaches a process meanwhile."""

    def joining(self) -> None:
        faulthandler.dump_traceback_later(START_LIMIT, exit=True, file=2)

    def joined(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    close = joined


class _Keeper(Watchdog):
    """The process `keeper.py` of this rank."""

    def __init__(self, started: int) -> None:
        variable = next((name for name in _RANKS if whole_number(os.environ.get(name, "")) is not None), _RANKS[0])
        rank, here = whole_number(os.environ.get(variable, "")) or 0, ranks_on_this_host()
        host, _, launcher = os.environ.get(LAUNCHER, "").rpartition(" ")
        arguments = [*map(str, (rank, here, started, START_LIMIT)), variable]
        arguments += [launcher] if host == socket.gethostname() else []
        command = [sys.executable, "-I", "-S", keeper.__file__, *arguments]
        # A session of its own, so that Ctrl-C reaches only the rank, which may have something to save.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        before = signal.getsignal(keeper.END)
        self._before = signal.SIG_DFL if before is None else before
        libc: Any = ctypes.CDLL(None)
        # A handler in C, because Python's handlers wait for MPI's start: it calls _exit with the signal's number.
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(int(keeper.END), ctypes.cast(libc._exit, ctypes.c_void_p))

    def joining(self) -> None:
        self._tell(keeper.JOINING)

    def joined(self) -> None:
        signal.signal(keeper.END, self._before)
        self._tell(keeper.JOINED)

    def _tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            os.write(self._process.stdin.fileno(), message)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        signal.signal(keeper.END, self._before)


_watchdogs: list[Watchdog] = []  # the one of this process, if there is one


def _join(started: int) -> World:
    try:
        module = importlib.import_module("wgrad.train.ranks.mpi_world")
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no libmpi
        raise WgradError(f"{started} processes were started, and MPI cannot be used ({error}): {INSTALL}") from error
    size = module.MPI.COMM_WORLD.size
    if size != started:
        raise WgradError(
            f"{started} processes were started, and MPI sees {size}: the launcher is not of the MPI that mpi4py uses "
            f"({module.MPI.Get_library_version().split(',')[0].strip()}): start with that one's mpirun (or srun "
            "--mpi=pmix)"
        )
    world: World = module.MpiWorld()
    return world
