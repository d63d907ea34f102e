"""Ranks under MPI, through mpi4py, which only this file imports.

All collectives are non-blocking and polled, so that each wait has a limit, and signals are handled meanwhile. Until the
first step, all of them are `all_gather`, so that a failing rank can send its error instead of its next value. With
user-level failure mitigation (ULFM), a failing collective is revoked on all ranks. They then agree whether it was done,
and shrink to the remaining ones.
Source: MPI 4.1; ULFM 2 (fault-tolerance.org), in mpi4py as Revoke, Iagree and Shrink.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import mpi4py
import numpy as np

mpi4py.rc.finalize = False  # after a loss it would wait for dead ranks
from mpi4py import MPI  # noqa: E402

from wgrad.device.cores import affinity  # noqa: E402
from wgrad.device.errors import DeviceLost  # noqa: E402
from wgrad.device.openblas import share_cores  # noqa: E402
from wgrad.train.ranks.all_reduce import AllReduce, Between, Request  # noqa: E402
from wgrad.train.ranks.host_memory import HostMemory, Segment, nbytes, open_segment, private_memory  # noqa: E402
from wgrad.train.ranks.polls import POLL, poll_pause  # noqa: E402
from wgrad.train.ranks.world import Member, PeerLost, RankFailure, RanksLost, RanksSilent, World  # noqa: E402
from wgrad.train.terminal.ending import ending_of, one_line  # noqa: E402

T = TypeVar("T")
# Limits of waits, in seconds.
LONG_LIMIT = 1800.0  # before the steps: shaders to compile, data to read
FILE_LIMIT = 300.0  # for the first rank to write files between steps
STEP_LIMIT = 50.0  # within steps, in addition to ten times the longest wait so far
FIRST_STEP_LIMIT = 600.0  # the first step may compile, and it is not known yet how uneven the ranks are
SPIN = 0.002  # time in which a wait polls without a pause
PAUSE = 0.0002  # time between polls after that, at first
LEADERS_LIMIT = 60.0  # for MPI to make a communicator
_END = 10.0  # for MPI to finalize
_MEMORY = "the memory that ranks share"
_ALARM = 1  # tag of the message that a rank has lost its device, for MPI without ULFM
_REGROUP = "going back after a lost device"


@dataclass(frozen=True)
class _Failure:
    """Sent by a failed rank instead of its value."""

    member: Member
    message: str
    status: int


@dataclass(frozen=True)
class _Gone:
    """Sent by a rank whose device was lost instead of its value."""

    member: Member
    message: str


class _Alarm(Exception):
    """Another rank has lost its device."""


def _silent(what: str, limit: float) -> RanksSilent:
    return RanksSilent(
        f"no answer from another rank for {limit:.0f} s ({what}): the logs in OUT/ranks end with what each did last; "
        "--resume goes on from the last checkpoint, with fewer ranks if need be"
    )


class _Leaders:
    """Sum between hosts. comm: communicator of one rank of each host."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        if comm != MPI.COMM_NULL:
            comm.Set_errhandler(MPI.ERRORS_RETURN)

    def start(self, values: np.ndarray, begin: int) -> Request:
        request: Request = self._comm.Iallreduce(MPI.IN_PLACE, values, MPI.SUM)
        return request


class MpiWorld(World):
    """The ranks of MPI.COMM_WORLD, and after losses the remaining ones."""

    alone = False

    def __init__(self) -> None:
        super().__init__()
        self._comm: Any = MPI.COMM_WORLD
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.tolerant = os.environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")
        self.rank, self.size = self._comm.rank, self._comm.size
        self.me = Member(self.rank, socket.gethostname())
        self._stepping, self._stepped, self._any_lost, self._longest = False, False, False, 0.0
        self._next: Any = None if self.tolerant else self._comm.Dup()  # communicator to meet on after an alarm
        self._kept: list[Any] = []  # requests and memory that MPI may still use, kept to the end
        self._apart = False  # whether ranks of one host cannot share memory
        started = self.all_gather((self.me, affinity()), "the start")
        self.members = [member for member, _ in started]
        here = {member.number: cores for member, cores in started if member.host == self.me.host}
        self.local_rank, self.local_size = list(here).index(self.me.number), len(here)
        share_cores(list(here.values()))

    # ---- waiting ---------------------------------------------------------------------------------
    def _wait(
        self, request: Any, what: str, limit: float = LONG_LIMIT, pause: float = PAUSE, *, heed: bool = True
    ) -> float:
        """Wait for a request and return the seconds that took. heed: whether an alarm ends the wait."""
        begun = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - begun
            if waited > limit:
                raise _silent(what, limit)
            if heed and self._alarmed():
                self._kept.append(request)
                raise _Alarm
            time.sleep(max(pause, poll_pause(waited)) if waited > SPIN else 0)
        return time.monotonic() - begun

    def _alarmed(self) -> bool:
        """Return whether another rank has lost its device. With ULFM the communicator is revoked instead."""
        return not self.tolerant and bool(self._comm.Iprobe(MPI.ANY_SOURCE, _ALARM))

    def _step_limit(self) -> float:
        if not self._stepping:
            return LONG_LIMIT
        return STEP_LIMIT + 10 * self._longest if self._longest else FIRST_STEP_LIMIT

    # ---- collectives -----------------------------------------------------------------------------
    def all_gather(self, value: T, what: str) -> list[T]:
        while True:
            try:
                values = self.attempt(lambda: self._gather(value, what))
            except RanksLost:
                continue
            failures = [v for v in values if isinstance(v, _Failure)]
            if failures:
                raise self._failure(failures)
            return values

    def _gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        limit = self._step_limit() if limit is None else limit
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([data.size], np.int64), sizes), what, limit)
        everything = np.empty(int(sizes.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(data, (everything, sizes.tolist())), what, limit)
        ends = np.cumsum(sizes)
        return [pickle.loads(everything[end - n : end].tobytes()) for n, end in zip(sizes, ends)]

    def broadcast(self, work: Callable[[], T], what: str) -> T:
        done: list[T] = []
        while True:
            if self.is_main_process and not done:
                done.append(work())
            try:
                limit = FILE_LIMIT if self._stepping and not self.is_main_process else None
                found = self.attempt(partial(self._gather, done[0] if done else None, what, limit))[0]
                if isinstance(found, _Failure):  # the first rank has no value, and sends the reason
                    raise self._failure([found])
                return cast(T, found)
            except RanksLost:
                continue

    def attempt(self, work: Callable[[], T]) -> T:
        result: Any = None
        try:
            result = work()
        except _Alarm:
            self._meet()
        except MPI.Exception as error:
            if not self.tolerant:
                raise RanksSilent(f"a rank was lost ({error}): --resume goes on from the last checkpoint") from error
            self._comm.Revoke()  # on any error: a lost rank has many error codes inside a collective
            done = False
        else:
            done = True
        if not self.tolerant or self._agree(done):
            return cast(T, result)
        self._shrink()
        raise RanksLost()

    def _agree(self, done: bool) -> bool:
        """Return whether it is done on all ranks, the same answer on all remaining ones."""
        flag = np.array([done], np.int32)
        try:
            self._wait(self._comm.Iagree(flag), "agreeing whether a rank is lost", self._step_limit())
        except MPI.Exception:  # a rank is gone; the flag is valid
            pass
        return bool(flag[0])

    def _shrink(self, value: Any = None) -> None:
        """Continue with the remaining ranks. value: a _Failure of this rank, which ends all, or a _Gone."""
        before, first = self.members, self.is_main_process
        agreed = False
        while not agreed:
            self._comm = self._comm.Shrink()
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self.rank, self.size, self._any_lost = self._comm.rank, self._comm.size, True
            values: list[Any] = []
            try:
                values = self._gather(value or self.me, "the ranks that are left")
            except MPI.Exception:
                self._comm.Revoke()
            agreed = self._agree(bool(values))
        failures = [v for v in values if isinstance(v, _Failure)]
        if failures:
            raise self._failure(failures)
        gone = [v for v in values if isinstance(v, _Gone)]
        self.members = [v.member if isinstance(v, _Gone) else v for v in values]
        lost = [member for member in before if member not in self.members]
        if lost:
            self.on_loss(lost, self.is_main_process and not first)
        elif not gone:
            raise RanksSilent("MPI failed, and no rank is lost: --resume goes on from the last checkpoint")
        self._go_back(gone)

    def _meet(self, value: _Gone | None = None) -> None:
        """Without ULFM: leave the communicator, in which other ranks may wait, and meet on a new one."""
        values: list[Any] = []
        while not values:
            self._comm = self._next
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self._next, request = self._comm.Idup()
            self._wait(request, _REGROUP, heed=False)
            try:
                values = self._gather(value or self.me, _REGROUP)
            except _Alarm:  # another one, of a rank that had finished this
                pass
        self._go_back([v for v in values if isinstance(v, _Gone)])

    def _go_back(self, gone: list[_Gone]) -> None:
        """Raise PeerLost on the ranks whose own device was not lost. gone: ranks whose device was."""
        if gone:
            self._stepping = False  # devices are opened and weights are read before the next step
            if all(v.member != self.me for v in gone):
                raise PeerLost("; ".join(f"{v.member}: {v.message}" for v in gone))

    def regroup(self, lost: DeviceLost) -> None:
        if isinstance(lost, PeerLost):
            return
        self._stepping, gone = False, _Gone(self.me, one_line(lost))
        if self.tolerant:
            self._comm.Revoke()
            self._agree(False)
            self._shrink(gone)
            return
        for rank in range(self.size):
            if rank != self.rank:
                self._kept.append(self._comm.Isend(np.zeros(1, np.uint8), rank, _ALARM))
        self._meet(gone)

    def all_reduce(self, values: np.ndarray, what: str, *, patient: bool = False) -> None:
        limit = LONG_LIMIT if patient else self._step_limit()
        self.waited = self._wait(self._comm.Ibarrier(), what, limit)  # with pauses, to leave the CPU to slower ranks
        if not patient:
            self._longest = max(self._longest, self.waited, 1e-3)
        self._wait(self._comm.Iallreduce(MPI.IN_PLACE, values, MPI.SUM), what, limit, POLL)

    # ---- the exchange of gradients ---------------------------------------------------------------
    def open_all_reduce(self, size: int, buckets: Sequence[tuple[int, int]]) -> AllReduce:
        while (memory := self._open_memory(size, len(buckets))) is None:
            pass
        between = None
        if len(set(self._hosts())) > 1:
            between = self.attempt(lambda: self._between(memory.rank == 0))
        made = AllReduce(memory, buckets, between)
        self._kept.append(made)  # MPI and devices may still write to it after it is dropped
        return made

    def _hosts(self) -> list[object]:
        """Return an id for each rank of the memory that it shares with others."""
        return [member.number if self._apart else member.host for member in self.members]

    def _open_memory(self, size: int, buckets: int) -> HostMemory | None:
        """Open the memory of this host; None: try again, because a rank was lost or cannot share memory."""
        members, hosts, reason = self.members, self._hosts(), ""
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        memory, segment = private_memory(size if len(here) == 1 else 0, buckets), None
        if len(here) > 1 and self.rank == here[0]:
            try:
                segment = Segment(nbytes(len(here), size, buckets))
            except OSError as error:
                reason = one_line(error)
        addresses = self.all_gather(None if segment is None else segment.address, _MEMORY)
        if members == self.members and (address := addresses[here[0]]) is not None:
            try:
                buffer = open_segment(address) if segment is None else segment.buffer
                memory = HostMemory(buffer, here.index(self.rank), len(here), size, buckets)
            except OSError as error:
                reason = one_line(error)
        reasons = [r for r in self.all_gather(reason, _MEMORY) if r]
        if segment is not None:
            segment.close()
        if members != self.members:
            return None
        if reasons:
            self._apart = True
            self.remark = f"note: ranks of one host share no memory ({reasons[0]}): gradients are summed by MPI alone"
            return None
        return memory

    def _between(self, leads: bool) -> Between:
        """Return the sum between hosts. Only leaders of a host call it."""
        # MPI has no non-blocking way to split a communicator that could be polled.
        faulthandler.dump_traceback_later(LEADERS_LIMIT, exit=True, file=2)
        try:
            leaders = self._comm.Split(0 if leads else MPI.UNDEFINED, self.rank)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return _Leaders(leaders)

    def pause(self, waited: float, what: str) -> None:
        if waited > self._step_limit():
            raise _silent(what, self._step_limit())
        if self.tolerant:  # MPI makes progress, and notices a lost rank, only when it is polled
            self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            if self._comm.Is_revoked():
                raise MPI.Exception(MPI.ERR_OTHER)
        if self._alarmed():
            raise _Alarm
        time.sleep(poll_pause(waited))

    def came(self, waited: float) -> None:
        self._longest = max(self._longest, waited, 1e-3)

    # ---- begin and end ---------------------------------------------------------------------------
    def steps_begin(self) -> None:
        self._stepping = self._stepped = True

    def steps_end(self) -> None:
        self._stepping = False

    def _failure(self, failures: list[_Failure]) -> RankFailure:
        first = failures[0]
        common = first.member.number == 0 or len(failures) == self.size
        return RankFailure(
            first.message if common else f"{first.member}: {first.message}", first.status, self.is_main_process
        )

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        try:
            yield
        except RankFailure:
            raise
        except BaseException as error:
            ending = ending_of(error)
            if ending is None:
                traceback.print_exc()
            failure = _Failure(self.me, *(ending or (f"{type(error).__name__}: {error}", 1)))
            if isinstance(error, RanksSilent):
                self._abort(failure)
            if not self._stepping:
                self.all_gather(failure, "an error")
            elif self.tolerant:
                self._comm.Revoke()
                self._agree(False)
                self._shrink(failure)
            else:
                self._abort(failure)
            raise AssertionError("one of these raises, or ends the process") from error

    def _abort(self, failure: _Failure) -> None:
        """End all processes without an agreement."""
        time.sleep(0 if self.is_main_process else 2.0)  # so that the first rank reports what happens to all
        who = "" if self.is_main_process else f"{failure.member}: "
        print(f"wgrad: error: {who}{failure.message}", file=sys.stderr, flush=True)
        threading.Timer(_END, os._exit, (failure.status,)).start()
        MPI.COMM_WORLD.Abort(failure.status)

    def leave(self, error: BaseException) -> None:
        if self.tolerant and self._stepped and self.size > 1:
            print(f"wgrad: {self.me}: {one_line(error)}: this rank ends", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # MPI would make any exit status that of the whole run

    def close(self) -> None:
        if not self._any_lost:
            timer = threading.Timer(_END, os._exit, (1,))
            timer.daemon = True
            timer.start()
            MPI.Finalize()
            timer.cancel()
