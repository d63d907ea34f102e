"""Work in its order on a thread of its own, beside what the thread goes on with that hands it over."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class SubmitThread:
    """begin: called on the thread before anything else. The thread is there from the first `submit` until this object,
    or the program, ends; what was handed over by then is done.

    cpu: seconds of CPU time that it has taken.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, "wgrad-submit", begin)
        self._last: Future[Any] | None = None
        self._error: Exception | None = None
        self.cpu = 0.0

    def submit(self, work: Callable[[], Any], drop: Callable[[], object]) -> Future[Any]:
        """-> what `work` returns, which is done behind all that came before. Once something has failed `drop` is called
        in its place, until `drain` has raised that, and the result is None."""
        self._last = self._pool.submit(self._do, work, drop)
        return self._last

    def _do(self, work: Callable[[], Any], drop: Callable[[], object]) -> Any:
        try:
            return work() if self._error is None else drop()
        except Exception as error:
            self._error = error
            return None
        finally:
            self.cpu = time.thread_time()

    def drain(self) -> None:
        """Until all that was handed over is done. Raises what failed first, once."""
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
