"""Runs cases: `wgrad` in a forked child with limits; a crash, a hang or lost memory stays its own.

A fork costs milliseconds where a fresh interpreter with NumPy and tokenizers costs half a second; several cases in one
child cost less still. Linux only.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import resource
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import wgrad.train.commands.cli as cli
from tests.fuzz.caches import COMMAND, read_cache_file
from tests.fuzz.case import Case, Content, Files, write_files
from tests.fuzz.forked_worker import forked_workers
from tests.fuzz.guided import CALL_READERS
from tests.fuzz.leftovers import leftovers, state
from tests.fuzz.library import PYTHON, call
from tests.fuzz.readers import READERS
from tests.fuzz.reports import REPORT, read_report
from tests.fuzz.servers import HTTP, answer, ending_at_once
from tests.fuzz.surroundings import HERE, surrounded

CPU_SECONDS = 10  # of one case; more is a hang
TEMPLATE_SECONDS = 120  # a template may take 5 s for each conversation that is rendered
WAIT_SECONDS = 10  # without computing; more is a hang too
WALL_SECONDS = 120  # where a busy machine gives a case that little of its time
DATA_LIMIT = 2 << 30  # private memory that a child may ask for beyond what it is born with
FILE_LIMIT = 1 << 30  # bytes that a case may write into one file
TRACEBACK_STATUS = 70  # of this file's child: an exception came out of `main`


@dataclass
class Outcome:
    """The outcome of a case. status: exit status, or minus the signal. grown: resident bytes at most, beyond before.

    left: what it leaves changed in its process."""

    status: int
    stdout: str
    stderr: str
    grown: int
    cpu_seconds: float
    timed_out: bool = False
    left: str = ""


shared_parser = lru_cache(64)(cli.build_parser)  # of what command; words that are none would be kept without end
_READERS = READERS | CALL_READERS | {COMMAND: read_cache_file, HTTP: answer, REPORT: read_report, PYTHON: call}
Judge = Callable[[Case, Outcome, Path], str | None]
Verdict = tuple[Outcome, str | None]  # and what is wrong with it


class Sandbox:
    """A folder in which cases run one after the other, each in `work`, emptied between them."""

    def __init__(self, folder: Path, groups: dict[str, Files]) -> None:
        self.folder, self.groups = folder, groups
        self.work = folder / "work"

    def all_files(self, case: Case) -> dict[str, Content]:
        files: Files = {}
        for group in case.base:
            files |= self.groups[group]
        return files | case.files

    def run(self, case: Case, judge: Judge) -> Verdict:
        """Run a case in a new child process. Its folder stays unchanged until the next case."""
        return self.run_all([case], judge)[0]

    def run_all(self, cases: Sequence[Case], judge: Judge) -> list[Verdict]:
        """Run cases in one child; where one ends the child, those after it run in another."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(cases):
            rest = cases[len(verdicts) :]
            verdicts += self._fork(rest, judge)
        return verdicts

    def _fork(self, cases: Sequence[Case], judge: Judge) -> list[Verdict]:
        """Run cases in a child and return the verdicts of the first ones, at least one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            reader.close()
            _child(self, cases, judge, writer)
        writer.close()
        with reader:
            verdicts = list(_receive(reader, pid, len(cases)))
        complete = len(verdicts) == len(cases)
        timed_out = not complete and not _has_ended(pid)
        if not complete:
            _kill_group(pid)
        _, status, usage = os.wait4(pid, 0)
        left = _kill_group(pid)
        if not complete:
            code = os.waitstatus_to_exitcode(status)
            outcome = Outcome(
                status=code,
                stdout=_read(self.folder / "stdout"),
                stderr=_read(self.folder / "stderr"),
                grown=0,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                timed_out=timed_out or code == -signal.SIGXCPU,
            )
            verdicts.append((outcome, judge(cases[len(verdicts)], outcome, self.work)))
        elif left and verdicts[-1][1] is None:
            verdicts[-1] = (verdicts[-1][0], "a process of it goes on running")
        return verdicts


def _receive(pipe: Connection, pid: int, count: int) -> Iterator[Verdict]:
    """Verdicts as the child sends them, until it has ended or hangs."""
    for _ in range(count):
        if not _answers(pipe, pid):
            return
        try:
            yield pipe.recv()
        except EOFError:
            return


def _answers(pipe: Connection, pid: int) -> bool:
    """Wait for something in the pipe: WALL_SECONDS while the child computes, WAIT_SECONDS where it waits itself."""
    computed = None
    for _ in range(2 * WALL_SECONDS // WAIT_SECONDS):
        if pipe.poll(WAIT_SECONDS / 2):
            return True
        before, computed = computed, _ticks(pid)
        if before is not None and computed - before <= 2:
            return False
    return False


def _has_ended(pid: int) -> bool:
    """Return whether a child that closed its pipe is about to end, and not stuck."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(100))
    finally:
        os.close(descriptor)


def _ticks(pid: int) -> int:
    """Processor time of the session's processes so far, in clock ticks."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # has ended meanwhile
        if int(fields[3]) == pid:
            total += int(fields[11]) + int(fields[12])
    return total


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "backslashreplace")
    except FileNotFoundError:
        return ""


def _kill_group(pid: int) -> bool:
    """Kill the rest of the session that the child `pid` began, and return whether there was any."""
    try:
        os.killpg(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


# ---- in the child ------------------------------------------------------------------------------
def _child(box: Sandbox, cases: Sequence[Case], judge: Judge, pipe: Connection) -> NoReturn:
    status = 1
    try:
        os.setsid()
        sys.dont_write_bytecode = True  # Python before 3.14 keeps bytecode that a limit has cut off
        signal.signal(signal.SIGINT, signal.default_int_handler)
        data = _proc_bytes(5) + DATA_LIMIT
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A case that runs alone, as each with a finding does at last, does what a user's run does.
        with _shared() if len(cases) > 1 else nullcontext():
            for case in cases:
                outcome = _run(case, box)
                pipe.send((outcome, judge(case, outcome, box.work)))
        atexit._run_exitfuncs()  # what an interpreter does at its end; sys.exit would unwind the parent's code here
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


@contextmanager
def _shared() -> Iterator[None]:
    """Do the costly preparations once: workers' imports, the parser of the command line."""
    with forked_workers(), patch.object(cli, "build_parser", shared_parser):
        yield


def _run(case: Case, box: Sandbox) -> Outcome:
    os.chdir(box.folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shutil.rmtree(box.work, ignore_errors=True)
    box.work.mkdir()
    write_files(box.work, box.all_files(case))
    (box.folder / "stdin").write_bytes(case.stdin)
    os.chdir(box.work)
    _redirect(case, box.folder)
    used = resource.getrusage(resource.RUSAGE_SELF)
    begun = used.ru_utime + used.ru_stime
    most = TEMPLATE_SECONDS if case.kind == "template" else CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + most + 1, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    born = _proc_bytes(1)
    streams = not case.stdout and not {"closed", "written"} & set(case.around)  # which are replaced at a failure
    before, status = state(streams), TRACEBACK_STATUS
    try:
        with surrounded(case.around, box.work):
            status = _main([word.replace(HERE, str(box.work)) for word in case.argv])
    except BaseException:  # a Rust panic is no Exception
        with open(box.folder / "stderr", "a") if sys.stderr is None else nullcontext(sys.stderr) as stderr:
            traceback.print_exc(file=stderr)
    left = leftovers(before, streams)
    if case.around:
        gc.collect()  # what held a closed stream's number must not close the next case's
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.close()
        except (OSError, ValueError):
            pass
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Outcome(
        status=status,
        stdout=_read(box.folder / "stdout"),
        stderr=_read(box.folder / "stderr"),
        grown=max(0, _peak_bytes() - born),
        cpu_seconds=used.ru_utime + used.ru_stime - begun,
        left=left,
    )


def _proc_bytes(column: int) -> int:
    """A column of /proc/self/statm: 1 resident, 5 data."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def _redirect(case: Case, folder: Path) -> None:
    """Recreate the standard streams for a case, as an interpreter does at its start."""
    created = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    _replace(0, os.open(folder / "stdin", os.O_RDONLY))
    _replace(1, os.open(folder / "stdout", created))
    _replace(2, os.open(folder / "stderr", created))
    if case.stdout == "closed":  # a pipe whose reader has gone
        reader, writer = os.pipe()
        os.close(reader)
        _replace(1, writer)
    elif case.stdout:
        _replace(1, os.open(case.stdout, os.O_WRONLY))
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding=case.encoding)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=case.encoding)
    sys.stderr = io.TextIOWrapper(
        open(2, "wb", closefd=False), encoding=case.encoding, errors="backslashreplace", line_buffering=True
    )


def _replace(target: int, descriptor: int) -> None:
    if descriptor == target:  # a closed one was the first that was free
        os.set_inheritable(target, True)
        return
    os.dup2(descriptor, target)
    os.close(descriptor)


def _main(argv: list[str]) -> int:
    """Do as the console script and the interpreter's end: `main`, threads joined, standard output flushed."""
    try:
        reader = _READERS.get(argv[0]) if argv else None
        with ending_at_once():
            status = reader(argv[1]) if reader else cli.main(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored while flushing sys.stdout: {error!r}", file=sys.stderr)
        return 120
    return status
