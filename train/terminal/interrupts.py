"""Ctrl-C and other requests to end, so that a run loses nothing: SIGINT, SIGTERM, SIGHUP, and SIGBREAK on Windows.

Where nothing can be lost a request ends the run at once. While steps run the first waits for the end of the step (then
the run is saved), the second does not. While files are written every request waits until they are whole.

Python calls a signal's handler between two instructions of the main thread, which a shader's first compile or a long
product keeps away for minutes. So a thread of its own reads the signal's number from the wake-up descriptor and answers
at once; it also ends the process where the main thread does not come back after a second request.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from wgrad.train.terminal.output import Output

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
GRACE = 3.0  # seconds for the main thread to end by itself
_QUIET = 0.3  # seconds within which the main thread has ended mostly, and nothing need be said

_SHOW_CURSOR = "\x1b[?25h"

AT_ONCE, AFTER_STEP, WRITING = "at once", "after the step", "writing"


class Interrupted(KeyboardInterrupt):
    """A request to end. number: of the signal; the command's status is 128 + number."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


def end_at_signals() -> None:
    """Have requests to end other than Ctrl-C raise Interrupted as well; those that are ignored stay so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, end)


class Interrupts:
    """A context manager around a run. answer: prints a line, from any thread, and never raises. more: signals that are
    requests too. ends_process: a second request may end the process where the main thread does not come back.

    asked: the signal of the first request, or None. Signals that the process was started to ignore (nohup) stay so;
    outside the main thread nothing is handled.
    """

    def __init__(self, answer: Callable[[str], None], more: tuple[int, ...] = (), ends_process: bool = True) -> None:
        self.answer, self._signals, self._ends_process = answer, (*SIGNALS, *more), ends_process
        self.asked: int | None = None
        self._times = 0
        self._phase = AT_ONCE
        self._before: dict[int, object] = {}
        self._ended = threading.Event()

    # ---- what the main thread is at --------------------------------------------------------------
    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within the block the first request sets `asked` and no more; Interrupted at its end, if not before."""
        with self._in(AFTER_STEP):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within the block requests set `asked` and no more; Interrupted at its end, unless steps go on there."""
        with self._in(WRITING):
            yield

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before
        if self.asked is not None and self._phase == AT_ONCE:
            raise Interrupted(self.asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._times += 1
        self.asked = self.asked or number
        if self._phase == AT_ONCE or (self._phase == AFTER_STEP and self._times > 1):
            raise Interrupted(number)

    # ---- the thread that answers -------------------------------------------------------------------
    def _watch(self, reader: socket.socket) -> None:
        times = 0
        while data := reader.recv(1):
            if data[0] in self._before:
                times += 1
                threading.Thread(target=self._respond, args=(data[0], times), daemon=True).start()

    def _respond(self, number: int, times: int) -> None:
        phase = self._phase
        if phase == WRITING:
            self.answer("files are being written: the run ends when they are whole")
        elif times > 1:
            self._end_late(number)
        elif phase == AFTER_STEP:
            self.answer("saving after this step; again to stop now")
        elif not self._ended.wait(_QUIET):
            self.answer("stopping; again to stop without waiting for the device")

    def _end_late(self, number: int) -> None:
        """End the process where the main thread, asked twice, is kept in a call to the device.

        It writes nothing then: its handler, which raises, runs before any further line of it.
        """
        if not self._ends_process or self._ended.wait(GRACE):
            return
        words = threading.Thread(target=self._farewell, daemon=True)  # a pipe that nobody reads may hold it
        words.start()
        words.join(1.0)
        os._exit(128 + number)

    def _farewell(self) -> None:
        self.answer("stopped at once: what was done since the last checkpoint is lost")
        if Output().isatty():
            Output().write(_SHOW_CURSOR)  # which a bar hides
            Output().flush()

    # ---- begin and end -------------------------------------------------------------------------
    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        wanted = [s for s in self._signals if signal.getsignal(s) not in (signal.SIG_IGN, None)]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in wanted}
        self._thread = threading.Thread(target=self._watch, args=(self._reader,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._before:
            return
        for number, old in self._before.items():
            signal.signal(number, old)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._descriptor)
        self._writer.close()
        self._thread.join()
        self._reader.close()
