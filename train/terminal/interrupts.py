"""Ctrl-C and other requests to end a run without losing anything: SIGINT, SIGTERM, SIGHUP, and SIGBREAK on Windows.

If nothing can be lost, a request ends the run at once. During steps, the first request waits for the end of the step,
after which the run is saved; the second does not wait. While files are written, all requests wait until they are whole.

Python calls a signal's handler between two instructions of the main thread, which compiling a shader or a long matmul
can delay for minutes. So a separate thread reads the signal's number from the wake-up descriptor and answers at once.
It also ends the process if the main thread stays blocked after a second request.
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
_QUIET = 0.3  # seconds in which the main thread usually ends, so that no answer is needed

_SHOW_CURSOR = "\x1b[?25h"

AT_ONCE, AFTER_STEP, WRITING = "at once", "after the step", "writing"


class Interrupted(KeyboardInterrupt):
    """A request to end. number: number of the signal; the exit status is 128 + number."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


def end_at_signals() -> None:
    """Let all requests to end raise Interrupted, not only Ctrl-C. Ignored signals stay ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, end)


class Interrupts:
    """Context manager around a run that handles requests to end.

    Ignored signals (nohup) stay ignored; only the main thread handles signals.

    Args:
        answer: Prints a line, from any thread, and never raises.
        more: Further signals that are requests to end.
        ends_process: Whether a second request may end the process if the main thread stays blocked.

    Attributes:
        asked: Signal of the first request; None: there was none.
    """

    def __init__(self, answer: Callable[[str], None], more: tuple[int, ...] = (), ends_process: bool = True) -> None:
        self.answer, self._signals, self._ends_process = answer, (*SIGNALS, *more), ends_process
        self.asked: int | None = None
        self._times = 0
        self._phase = AT_ONCE
        self._before: dict[int, object] = {}
        self._ended = threading.Event()

    # ---- activity of the main thread -------------------------------------------------------------
    @contextmanager
    def steps(self) -> Iterator[None]:
        """Let the first request in the block only set `asked`. Interrupted is raised at the block's end."""
        with self._in(AFTER_STEP):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let requests in the block only set `asked`. Interrupted is raised at the block's end, except during steps."""
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
        """End the process if the main thread, asked twice, is blocked in a call to the device.

        This interrupts no writing: when the call returns, the signal's handler raises before any further line runs.
        """
        if not self._ends_process or self._ended.wait(GRACE):
            return
        words = threading.Thread(target=self._farewell, daemon=True)  # it may block in a pipe that nobody reads
        words.start()
        words.join(1.0)
        os._exit(128 + number)

    def _farewell(self) -> None:
        self.answer("stopped at once: what was done since the last checkpoint is lost")
        if Output().isatty():
            Output().write(_SHOW_CURSOR)  # a progress bar hides it
            Output().flush()

    # ---- entering and leaving ------------------------------------------------------------------
    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        wanted = [s for s in self._signals if signal.getsignal(s) not in (signal.SIG_IGN, None)]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, args=(self._reader,), daemon=True)
        self._thread.start()  # first: where the system refuses it, nothing else has been changed
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, old in self._before.items():
            signal.signal(number, old)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._descriptor)
        self._writer.close()
        self._thread.join()
        self._reader.close()
