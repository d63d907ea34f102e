"""A device on which nothing runs: it notes which shaders a piece of work launches, and how much memory it takes.

Which variants a run needs hangs on shapes and dtypes alone, never on values, so that the same Python code on this
device, without a byte of weights, gives all of them before the run begins; and its pool, with the same blocks leased
and returned in the same order, peaks where the real one will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.device.memory import Array, Pool
from wgrad.wgsl.runtime import native
from wgrad.wgsl.runtime.compile import Constant, Pipeline, Variant
from wgrad.wgsl.runtime.runtime import Runtime


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


_PLACEHOLDER_BYTES = 256  # no less than any uniform struct


def prepare(device: Runtime, dry: DryRun, progress: Callable[[int, int], None] | None = None) -> int:
    """Compile on `device` what `dry` launched and what is not compiled yet; -> how many variants those were.

    Some drivers (Mesa's lavapipe) make their machine code only at the first dispatch: each variant is dispatched once,
    with no workgroups. What does not compile is left for `launch` to report. progress: called with (done, in all).
    """
    missing = [v for v in dry.variants if not device._compiler.has(v)]
    device.flush()
    buffers: dict[int, Any] = {}
    for number, variant in enumerate(missing):
        if progress is not None:
            progress(number, len(missing))
        try:
            pipeline = device._compiler.get(variant.shader, variant.entry, dict(variant.constants))
        except DeviceLost:
            raise
        except DeviceError:
            continue
        group = device._device.create_bind_group(layout=pipeline.layout, entries=_bind(device, pipeline, buffers))
        device._queue.submit([(pipeline.handle, native.handle(group), 0, 0, 0)])
        device._queue.wait()
    if progress is not None:
        progress(len(missing), len(missing))
    return len(missing)


def _bind(device: Runtime, pipeline: Pipeline, buffers: dict[int, Any]) -> list[dict[str, Any]]:
    """A small buffer of its own for each binding (no two may be written through), which no invocation ever touches."""
    numbers = (0, *pipeline.bindings)
    for n in numbers:
        if n not in buffers:
            usage = "STORAGE" if n else "UNIFORM"
            buffers[n] = device._device.create_buffer(size=_PLACEHOLDER_BYTES, usage=usage)
    whole = {"offset": 0, "size": _PLACEHOLDER_BYTES}
    return [{"binding": n, "resource": {"buffer": buffers[n], **whole}} for n in numbers]


class DryRun(Runtime):
    """A `Runtime` that does what `device` would do, but for the work itself. Its arrays belong to it alone.

    variants: what was launched, each once, in the order of first use. Downloads give zeros.
    """

    def __init__(self, device: Runtime) -> None:
        self.adapter_type, self.description, self.software = device.adapter_type, device.description, device.software
        self.float16, self.bfloat16 = device.float16, device.bfloat16
        self.matrix_units, self.matrix_tile = device.matrix_units, device.matrix_tile
        self.max_binding_bytes, self.max_buffer_bytes = device.max_binding_bytes, device.max_buffer_bytes
        self.workgroup_bytes = device.workgroup_bytes
        self.profiler = None
        self.variants: dict[Variant, None] = {}
        self._pool = Pool(lambda nbytes: None, lambda block: None)

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

    def flush(self) -> None:
        pass

    def pipelines_compiled(self) -> int:
        return 0

    def launch(
        self,
        shader: str,
        arrays: Sequence[Array | None],
        params: Sequence[int | float],
        groups: tuple[int, int, int],
        constants: Mapping[str, Constant] | None = None,
        *,
        entry: str = "main",
        work: float = 0.0,
    ) -> None:
        self.variants[Variant(shader, entry, tuple((constants or {}).items()))] = None

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """The pool keeps what is used inside for replays, as the real one does."""
        self._pool.begin_capture()
        try:
            yield Nothing()
        finally:
            self._pool.end_capture()
