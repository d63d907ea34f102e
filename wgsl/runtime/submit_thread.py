"""A thread that does tasks in order while the caller goes on.

concurrent.futures does the same, but handing over a task takes 21 us on an H100's host, as long as recording half a
dozen dispatches, and a submission that begins with a copy has no more (bench/notes/rejected-runtime.md).

If the device is lost, the thread may stop for ever in a call (abort_guard.py). Another one then takes its place.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from wgrad.wgsl.runtime.abort_guard import guard_thread, release_thread

_SECONDS = 10.0  # for the last work with a device


class Submitted:
    """A task of the submit thread."""

    __slots__ = ("_done", "_value")

    def __init__(self) -> None:
        self._value: Any = None
        self._done = Lock()
        self._done.acquire()

    def result(self) -> Any:
        """Wait for the task and return its result; None if it was dropped."""
        with self._done:
            return self._value

    def wait(self, seconds: float) -> bool:
        """Return whether the task is done, after at most so long."""
        done = self._done.acquire(timeout=seconds)
        if done:
            self._done.release()
        return done

    def do(self, work: Callable[[], Any], drop: Callable[[], object], state: _State) -> None:
        state.task = self
        try:
            if state.error is None:
                self._value = work()
            else:
                drop()
        except BaseException as error:
            state.error = error
        finally:
            state.task = None
            self._done.release()

    def give_up(self) -> None:
        """Wake those who wait for a task that never ends."""
        self._done.release()


class _State:
    """State shared with the thread. error: the first failure, until it is raised. task: what `thread` is doing."""

    error: BaseException | None = None
    cpu = 0.0
    task: Submitted | None = None
    thread: Thread | None = None

    def __init__(self) -> None:
        self.last: SimpleQueue[Callable[[], None]] = SimpleQueue()  # work for a thread that has stopped for ever
        self.stopped = False  # whether one has


_Work = SimpleQueue[tuple[Submitted, Callable[[], Any], Callable[[], object]] | None]


def _nothing() -> None:
    pass


def _wait_without_limit(given: Submitted) -> None:
    given.result()


class SubmitThread:
    """A thread from the first `submit` until this object, or the program, ends, after all its tasks.

    begin: called on the thread before anything else.
    aborted: makes the error of a task that would have aborted the process.
    cpu: seconds of CPU time that the thread has taken.
    """

    def __init__(self, begin: Callable[[], None], aborted: Callable[[], BaseException]) -> None:
        self._begin, self._aborted = begin, aborted
        self._work: _Work = SimpleQueue()
        self._state = _State()
        self._last: Submitted | None = None
        self._ended = False

    @property
    def cpu(self) -> float:
        return self._state.cpu

    def submit(self, work: Callable[[], Any], drop: Callable[[], object]) -> Submitted:
        """Do `work` after all earlier tasks; the task's result is what it returns.

        After a failure, `drop` is called instead, and the result is None, until `drain` has raised the error.
        """
        given = Submitted()
        if self._ended:  # the program ends: nobody else would do it
            given.do(work, drop, self._state)
            return given
        if self._state.thread is None:
            _start(self._work, self._state, self._begin, self._aborted)
            weakref.finalize(self, self._work.put, None).atexit = False
            _running.add(self)
        self._work.put((given, work, drop))
        self._last = given
        return given

    def drain(self, wait: Callable[[Submitted], None] = _wait_without_limit) -> None:
        """Wait, by `wait`, until all tasks are done. Raises the first failure, once."""
        if self._last is not None:
            wait(self._last)
            self._last = None
        if self._state.error is not None:
            error, self._state.error = self._state.error, None
            raise error

    def end(self) -> None:
        """End the thread after all its tasks."""
        self._ended = True
        self._work.put(None)
        if self._state.thread is not None:
            self._state.thread.join()

    def end_with(self, panics: Callable[[], Any], there: Callable[[], None], then: Callable[[], None]) -> None:
        """Do the last work with a device: `there` in a thread that has panicked in the library, `then` in a normal one.

        panics: a call that panics, to get such a thread.
        """
        if not self._state.stopped:
            self.submit(panics, _nothing).wait(_SECONDS)
        if self._state.stopped:
            done = Event()
            for work in (there, done.set):
                self._state.last.put(work)
            if not done.wait(_SECONDS):
                return
        else:  # the panic was caught
            self.submit(there, there).wait(_SECONDS)
        self.submit(then, then).wait(_SECONDS)

    def abandon(self) -> None:
        """Do not wait for this thread at exit: its call never returns."""
        _running.discard(self)


def _start(handed: _Work, state: _State, begin: Callable[[], None], aborted: Callable[[], BaseException]) -> None:
    # A daemon, because Python waits for other threads before it calls `_end_all`.
    state.thread = Thread(target=_run, args=(handed, state, begin, aborted), name="wgrad-submit", daemon=True)
    state.thread.start()


def _run(handed: _Work, state: _State, begin: Callable[[], None], aborted: Callable[[], BaseException]) -> None:
    def go_on() -> None:
        """Hand over to a new thread, and stop this one for ever."""
        task, state.task, state.stopped = state.task, None, True
        state.error = state.error or aborted()
        _start(handed, state, begin, aborted)
        if task is not None:
            task.give_up()
        while True:
            state.last.get()()

    begin()
    guard_thread(go_on)
    while (given := handed.get()) is not None:
        submitted, work, drop = given
        submitted.do(work, drop, state)
        state.cpu = time.thread_time()
        del given, submitted, work, drop  # which would keep a queue alive
    release_thread()


_running: weakref.WeakSet[SubmitThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for thread in list(_running):
        thread.end()
