"""A pytest plugin that imports and collects tests once, and then forks the processes that run them.

`-p tests.forks --forks auto` replaces `-n auto` of pytest-xdist, with which each worker imports and collects all tests.
Where a system cannot fork soundly, and with `-n`, tests run as pytest-xdist runs them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

POLL_S = 2.0  # a worker whose own children keep its pipe open is found dead after this time
EXIT_S = 10.0  # time for a worker to run its exit functions


class Hooks:
    @pytest.hookspec
    def pytest_before_forks(self, session: pytest.Session) -> None:
        """Import what most workers use. The worker with the last tests is forked before this."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run tests in this many forked processes, or auto: as many as -n auto of pytest-xdist"
    parser.addoption("--forks", metavar="N", default="0", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Leave the tests to pytest-xdist where there is no fork, or, as on macOS, the libraries do not bear it."""
    option = config.option
    if option.forks != "0" and option.numprocesses is None and not sys.platform.startswith("linux"):
        option.numprocesses = option.forks if option.forks == "auto" else int(option.forks)
        option.dist = "worksteal"


def _count(config: pytest.Config) -> int:
    """Return the number of workers, or 0: this plugin has nothing to do."""
    option = config.option
    if option.numprocesses is not None or option.collectonly or option.usepdb:
        return 0
    if option.forks != "auto":
        return int(option.forks)
    count = int(config.hook.pytest_xdist_auto_num_workers(config=config))
    return min(count, option.maxprocesses or count)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked processes, if there is more than one to run."""
    count = min(_count(session.config), len(session.items))
    if count < 2 or session.testsfailed:  # pytest itself reports errors of collection
        return None
    if threads() > 1:
        raise pytest.UsageError("a process with several threads cannot be forked: run without --forks, or with -n")
    _Run(session, count).run()
    return True


def threads() -> int:
    """Return the number of threads of this process, those of libraries included."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.is_dir() else threading.active_count()


class _Worker:
    """A forked process, as its parent sees it."""

    def __init__(self, number: int, pipe: Connection, pid: int, queue: deque[int]) -> None:
        self.number, self.pipe, self.pid, self.queue = number, pipe, pid, queue
        self.given: deque[int] = deque()  # the test that runs, and the next one
        self.ended = False


class _Run:
    """The parent's side of a run: it gives out tests and reports their results."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self.session, self.config, self.items = session, session.config, session.items
        self.workers: list[_Worker] = []
        self.forked = 0
        self.reported = 0
        self.stop = ""
        bounds = [i * len(self.items) // count for i in range(count + 1)]
        self.shares = [deque(range(*pair)) for pair in zip(bounds, bounds[1:])]
        if reporter := self.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.showfspath = False  # results of several files are interspersed

    def run(self) -> None:
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # workers make their folders in it
        try:
            self.start(self.shares.pop())
            self.config.hook.pytest_before_forks(session=self.session)
            for share in self.shares:
                self.start(share)
            while self.workers:
                self.serve()
        finally:
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGTERM)
            for worker in self.workers:
                self.join(worker)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.stop or self.session.shouldstop:
            raise self.session.Interrupted(self.stop or self.session.shouldstop)
        if self.reported < len(self.items):
            raise RuntimeError(f"{len(self.items) - self.reported} tests have no result")

    def start(self, queue: deque[int]) -> None:
        mine, its = Pipe()
        number, self.forked = self.forked, self.forked + 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for descriptor in (mine, *(worker.pipe for worker in self.workers)):
                descriptor.close()  # if the parent dies, each worker reads the end of its pipe
            _work(self.session, its, number)
        its.close()
        worker = _Worker(number, mine, pid, queue)
        self.workers.append(worker)
        self.give(worker)
        self.give(worker)

    def give(self, worker: _Worker) -> None:
        """Give the worker another test, its own or one of the worker that has most, or None: there is none left."""
        if self.stop or self.session.shouldfail or self.session.shouldstop:
            following = None
        else:
            if not worker.queue:
                longest = max((other.queue for other in self.workers), key=len)
                worker.queue.extend(longest.pop() for _ in range((len(longest) + 1) // 2))
                worker.queue.reverse()
            following = worker.queue.popleft() if worker.queue else None
        if following is not None:
            worker.given.append(following)
        try:
            worker.pipe.send(following)
        except OSError:  # it has died: `serve` reads the end of its pipe
            pass

    def serve(self) -> None:
        """Handle messages of workers, and their deaths."""
        ready = wait([worker.pipe for worker in self.workers], POLL_S)
        for worker in [*self.workers]:
            if worker.pipe in ready:
                if message := _received(worker.pipe):
                    self.receive(worker, *message)
                else:
                    self.bury(worker)
            elif not ready and _has_ended(worker.pid) and not worker.pipe.poll():
                self.bury(worker)

    def receive(self, worker: _Worker, kind: str, *values: Any) -> None:
        if kind == "warning":
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=values[0])
        elif kind == "tested":
            item = self.items[worker.given.popleft()]
            self.give(worker)
            self.report(item, values[0])
        elif kind == "stop":
            self.stop = values[0]
        else:
            worker.ended = True

    def report(self, item: pytest.Item, reports: Sequence[Any]) -> None:
        self.reported += 1
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            if isinstance(report, dict):
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=report)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def bury(self, worker: _Worker) -> None:
        """Take leave of a worker. If it died before its end, fail the test that it ran and go on in a new one."""
        status = self.join(worker)
        self.workers.remove(worker)
        if worker.ended or self.stop:
            return
        left = worker.queue
        if worker.given:
            item = self.items[worker.given.popleft()]
            end = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            text = f"the process that ran this test ended {end}"
            report = pytest.TestReport(
                item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call", ()
            )
            self.report(item, [report])
            left.extendleft(reversed(worker.given))
        if left or any(other.queue for other in self.workers):
            self.start(left)

    def join(self, worker: _Worker) -> int:
        """Wait for the end of a worker, kill it after a while, and return its exit status, as `subprocess` does."""
        worker.pipe.close()
        until = time.monotonic() + EXIT_S
        while not _has_ended(worker.pid):
            if time.monotonic() > until:
                os.kill(worker.pid, signal.SIGKILL)
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def _received(pipe: Connection) -> tuple[Any, ...]:
    """Return a message, or (): the other process has ended."""
    try:
        message: tuple[Any, ...] = pipe.recv()
    except (EOFError, OSError):
        return ()
    return message


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave its status to `waitpid`."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Silent:
    """Stands for the terminal's reporter in workers, whose parent reports."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


class _Sender:
    """The reports of the test that runs, and warnings, in a worker."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe
        self.reports: list[Any] = []
        self.registered = False  # pytest repeats to each new plugin the warnings so far, which the parent knows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed:
            self.reports.append(report)
        else:
            self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.registered:
            return
        try:
            pickle.loads(pickle.dumps(warning_message))
        except Exception:
            about = warning_message
            warning_message = warnings.WarningMessage(str(about.message), UserWarning, about.filename, about.lineno)
        values = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self.pipe.send(("warning", values))


def _work(session: pytest.Session, pipe: Connection, number: int) -> NoReturn:
    """Run the tests that the parent names, in the forked process."""
    config = session.config
    atexit._clear()  # those of the parent
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # tells packages and fixtures that other processes run tests, too
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders._basetemp / f"gw{number}"
    folders._basetemp.mkdir(mode=0o700)
    manager = config.pluginmanager
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    if reporter := manager.unregister(name="terminalreporter"):
        manager.register(_Silent(reporter._tw), "terminalreporter")
    sender = _Sender(config, pipe)
    manager.register(sender, "forks-sender")
    sender.registered = True
    try:
        current = pipe.recv()
        while current is not None:
            following = pipe.recv()
            item = session.items[current]
            try:
                config.hook.pytest_runtest_protocol(
                    item=item, nextitem=None if following is None else session.items[following]
                )
            except (KeyboardInterrupt, pytest.exit.Exception) as stop:
                pipe.send(("stop", f"{item.nodeid}: {stop!r}"))
                raise
            pipe.send(("tested", sender.reports))
            sender.reports = []
            if reason := session.shouldfail or session.shouldstop:  # as with -x
                pipe.send(("stop", str(reason)))
                break
            current = following
        pipe.send(("end",))
        status = 0
    except EOFError:
        status = 1  # the parent has died
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
