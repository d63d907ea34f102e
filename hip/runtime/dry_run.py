"""A device on which nothing runs: it notes which kernels a piece of work launches, and how much memory it takes.

Which kernels a run needs hangs on shapes and dtypes alone, never on values: see wgsl/runtime/dry_run.py, its twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from wgrad.device.memory import Array, Pool
from wgrad.hip.runtime.runtime import Runtime


class Zeros:
    """The `Readback` of an array without contents."""

    def __init__(self, array: Array) -> None:
        self._value = np.zeros(array.shape, array.dtype)

    def ready(self) -> bool:
        return True

    def result(self) -> np.ndarray:
        return self._value


class Nothing:
    """The replay of work that did not run."""

    dispatches = 0

    def run(self) -> None:
        pass


class DryRun(Runtime):
    """A `Runtime` that does what `device` would do, but for the work itself. Its arrays belong to it alone.

    kernels: (source, kernel) of what was launched, each once, in the order of first use. Downloads give zeros.
    """

    def __init__(self, device: Any) -> None:
        self.architecture, self.card, self.wave = device.architecture, device.card, device.wave
        self.compute_units, self.modules, self.description = device.compute_units, device.modules, device.description
        self.float16 = self.bfloat16 = True
        self.attention_rounding = device.attention_rounding
        self.profiler = None
        self.kernels: dict[tuple[str, str], None] = {}
        self._pool = Pool(lambda nbytes: 0, lambda block: None, exact=device._pool._exact)

    def upload(self, host: np.ndarray) -> Array:
        if host.dtype == np.int64:
            raise ValueError(f"upload: int64 is not a device dtype (array of shape {host.shape}); convert it to int32")
        return self.empty(host.shape, host.dtype)

    def write(self, array: Array, host: np.ndarray) -> None:
        pass

    def download(self, array: Array) -> np.ndarray:
        return np.zeros(array.shape, array.dtype)

    def readback(self, array: Array) -> Zeros:  # type: ignore[override]
        return Zeros(array)

    def synchronize(self) -> None:
        pass

    def pipelines_compiled(self) -> int:
        return 0

    def launch(
        self,
        source: str,
        kernel: str,
        arguments: Sequence[Any],
        grid: tuple[int, int, int],
        *,
        threads: int = 256,
        work: float = 0.0,
    ) -> None:
        self.kernels[source, kernel] = None

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """The pool keeps what is used inside for replays, as the real one does."""
        self._pool.begin_capture()
        try:
            yield Nothing()
        finally:
            self._pool.end_capture()
