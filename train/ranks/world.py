"""The ranks of a run: processes that train one adapter together, each on a device of its own, rank 0 speaking for all.

`World` is that of a run of one rank, in which every collective is the identity; nothing of MPI is imported for it.
`mpi_world.py` has the other one, `start.py` says which of them a process is in.
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
    """A rank as it was when the run began: `number` is its rank then, by which it is spoken of to the end."""

    number: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host})"


class RanksLost(Exception):
    """Ranks are gone. Those that are left have agreed on it, and on that the work at hand is done on none of them."""


class PeerLost(DeviceLost):
    """The device of another rank was lost. All ranks know, and go back to the newest state."""


class RanksSilent(UnusableResult):
    """Another rank has not answered within the limit of a wait, and nobody says that it is gone."""


class RankFailure(Exception):
    """The run ends on all ranks because of what happened on some. status: of every process. said: by this one."""

    def __init__(self, message: str, status: int, said: bool) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class World:
    """The ranks of a run, as one of them sees them.

    alone: this process was started by itself. rank, size: of those that are left. members: who they are. local_rank,
    local_size: at the begin, among those of this host. tolerant: the run goes on when a rank is lost (else it ends on
    all). waited: seconds in which this rank waited for the others in the last `all_reduce`. remark: what there is to
    say of how `open_all_reduce` went, or "". on_loss: called with those that were lost, and whether this rank has
    become the first.
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
        """Return whether this rank talks to the user, and writes what the run leaves in its folder."""
        return self.rank == 0

    def all_gather(self, value: T, what: str) -> list[T]:
        """Every rank's value, in the order of ranks. what: for people, should one not come. Where ranks are lost, those
        that are left exchange anew. RankFailure where a rank has failed."""
        return [value]

    def broadcast(self, work: Callable[[], T], what: str) -> T:
        """Return the result of `work` on the first rank, for which the others wait; if that is lost, on the next."""
        return work()

    def attempt(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which communicates: on all ranks, or RanksLost on all."""
        return work()

    def all_reduce(self, values: np.ndarray, what: str, *, patient: bool = False) -> None:
        """values (float32 or float64 [n], contiguous): in place, the sum over all ranks, the same bits on each.

        patient: what the ranks did before may have taken them very unequal times.
        """

    def open_all_reduce(self, size: int, buckets: Sequence[tuple[int, int]]) -> AllReduce:
        """Return a function that sums arrays of `size` float32 over all ranks: all call it alike, and again where ranks
        were lost.

        RanksLost: on all ranks.
        """
        return AllReduce(private_memory(size, len(buckets)), buckets)

    def pause(self, waited: float, what: str) -> None:
        """Between two questions of an AllReduce whether there is more to do. waited: seconds since this rank has had
        nothing else to do. RanksSilent, or an error for `attempt`, where others are silent or lost."""

    def came(self, waited: float) -> None:
        """Note that a wait with `pause` ended after so many seconds."""

    def total(self, value: float, what: str) -> float:
        """The sum of a number over all ranks. RanksLost on all where one is lost."""
        values = np.array([value], np.float64)
        self.attempt(lambda: self.all_reduce(values, what, patient=True))
        return float(values[0])

    def steps_begin(self) -> None:
        """From here on the ranks call more than `all_gather` and `broadcast`, and waits are short."""

    def steps_end(self) -> None:
        """All ranks are past the last step, or end alike."""

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """An error of the block ends all ranks, as RankFailure where they can agree on it."""
        yield

    def regroup(self, lost: DeviceLost) -> None:
        """Tell the other ranks that the device of this one was lost. Every wait of theirs ends with PeerLost."""

    def leave(self, error: BaseException) -> None:
        """End this process as one that is lost, where the others can go on without it."""

    def close(self) -> None:
        """The run is over on this rank, and on all others."""
