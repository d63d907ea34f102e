"""Ctrl-C and other requests to end a command that has nothing to save: SIGINT, SIGTERM, SIGHUP, SIGBREAK on Windows.

Each raises Interrupted, so that half-written files are removed on the way out. Python loses an exception that is raised
in a finalizer (`__del__`, a callback of the garbage collector) or in a callback of a C library, so such a request is
repeated. If the command fails before that, because the callback did not finish, it ends as interrupted. Python also
calls a handler only between two instructions of the main thread. If a call to a driver blocks that thread, SIGTERM and
SIGHUP end the process after some seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from wgrad.train.terminal.interrupts import GRACE, SIGNALS, Interrupted
from wgrad.train.terminal.output import say

_AGAIN_SECONDS = 0.05


class EndRequests:
    """Context manager around a command. Ignored signals (nohup) stay ignored; only the main thread handles signals."""

    def __enter__(self) -> EndRequests:
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}
        self._again: threading.Timer | None = None
        self._lost = 0
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()  # first: where the system refuses it, nothing else has been changed
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if threading.current_thread() is not threading.main_thread():
            return
        lost = 0  # the request that is to be repeated
        if (again := self._again) is not None and again.is_alive():
            again.cancel()
            lost = self._lost
        for number, old in self._before.items():
            signal.signal(number, old)
        sys.unraisablehook = self._hook
        signal.set_wakeup_fd(self._descriptor)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if lost and isinstance(error, Exception):
            raise Interrupted(lost) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    def _unraisable(self, lost: Any) -> None:
        """Repeat a request that was lost in a finalizer or callback, once that has returned (sys.unraisablehook)."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            self._hook(lost)
            return
        self._lost = getattr(lost.exc_value, "number", signal.SIGINT)
        self._again = threading.Timer(_AGAIN_SECONDS, _press, [self._lost])
        self._again.daemon = True
        self._again.start()

    def _watch(self) -> None:
        while data := self._reader.recv(1):
            # Ctrl-C need not end a command (`chat` stops an answer), and `serve` has handlers of its own.
            if data[0] != signal.SIGINT and signal.getsignal(data[0]) == self._handle:
                threading.Thread(target=self._end_late, args=(data[0],), daemon=True).start()

    def _end_late(self, number: int) -> None:
        if self._ended.wait(GRACE):
            return
        words = threading.Thread(target=say, args=("wgrad: interrupted", "stderr"), daemon=True)  # nobody may read it
        words.start()
        words.join(1.0)
        os._exit(128 + number)


def _press(number: int) -> None:
    """Send a signal to the main thread, to end a call in which it waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)
