"""The ranks of a run: processes that train one adapter together, each on a device of its own.

`World` is for a run with one rank: its collectives do nothing, and MPI is not imported. `mpi_world.py` has the class
for several ranks, and `start.py` chooses between them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from wgrad.device.errors import DeviceLost, UnusableResult
from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.host_memory import private_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A rank. number: its rank when the run began, which names it in all messages."""

    number: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host})"


class RanksLost(Exception):
    """Ranks are gone. The remaining ones agree on that, and that none of them has done the current work."""


class PeerLost(DeviceLost):
    """The device of another rank was lost. All ranks know that, and return to the newest state."""


class RanksSilent(UnusableResult):
    """Another rank has not answered in time, and is not known to be gone."""


class RankFailure(Exception):
    """The run ends on all ranks because of an error on some.

    status: exit status of all processes. said: whether this process prints the message.
    """

    def __init__(self, message: str, status: int, said: bool) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class World:
    """The ranks of a run, as one of them sees them.

    Attributes:
        alone: Whether this process is the only rank.
        rank, size: Number of this rank, and of all, among the remaining ranks.
        members: The remaining ranks.
        me: This rank.
        local_rank, local_size: Number of this rank, and of all, on this host when the run began.
        tolerant: Whether the run continues if a rank is lost; else it ends on all.
        waited: Seconds for which the last `all_reduce` waited for other ranks.
        remark: Note about `open_all_reduce`; "": none.
        on_loss: Called with the lost ranks, and whether this rank now is the first.
    """

    alone = True
    tolerant = False
    waited = 0.0
    remark = ""
    rank, size = 0, 1
    local_rank, local_size = 0, 1

    def __init__(self) -> None:
        self.me = Member(0, socket.gethostname())
        self.members = [self.me]
        self.on_loss: Callable[[list[Member], bool], None] = lambda lost, promoted: None

    @property
    def is_main_process(self) -> bool:
        """Return whether this rank prints for the user and writes the files of the run."""
        return self.rank == 0

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every rank's value, in the order of ranks. If ranks are lost, the remaining ones repeat it.

        what: description for errors. RankFailure: a rank has failed.
        """
        return [value]

    def broadcast(self, work: Callable[[], T], what: str) -> T:
        """Return the result of `work` on the first rank, for which the others wait. If it is lost, the next one works.

        what: description for errors.
        """
        return work()

    def attempt(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which communicates, or raise RanksLost on all ranks."""
        return work()

    def all_reduce(self, values: np.ndarray, what: str, *, patient: bool = False) -> None:
        """Sum values (float32 or float64 [n], contiguous) over all ranks in place, with the same bits on each.

        what: description for errors. patient: whether earlier work may have taken ranks very different times.
        """

    def open_all_reduce(self, size: int, buckets: Sequence[tuple[int, int]]) -> AllReduce:
        """Open a sum of `size` float32 over all ranks. All ranks call this, and again after ranks were lost.

        RanksLost: a rank was lost meanwhile.
        """
        return AllReduce(private_memory(size, len(buckets)), buckets)

    def pause(self, waited: float, what: str) -> None:
        """Pause between two polls of an AllReduce.

        waited: seconds for which this rank has had nothing to do. what: description for errors. Raises RanksSilent, or
        an error for `attempt`, if others are silent or lost.
        """

    def came(self, waited: float) -> None:
        """Record that a wait with `pause` has ended, after `waited` seconds."""

    def total(self, value: float, what: str) -> float:
        """Return the sum of a number over all ranks. RanksLost on all: one was lost."""
        values = np.array([value], np.float64)
        self.attempt(lambda: self.all_reduce(values, what, patient=True))
        return float(values[0])

    def steps_begin(self) -> None:
        """Begin the steps, in which ranks call more than `all_gather` and `broadcast`, and waits are short."""

    def steps_end(self) -> None:
        """End the steps. All ranks call this at the same point."""

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Let an error in the block end all ranks, as RankFailure if they can agree on it."""
        yield

    def regroup(self, lost: DeviceLost) -> None:
        """Tell the other ranks that the device of this one was lost. Their waits end with PeerLost."""

    def leave(self, error: BaseException) -> None:
        """End this process as a lost rank, if the others can continue without it."""

    def close(self) -> None:
        """Finish the run on this rank. All ranks call this."""
