"""The dry run (device/dry_run.py) on wgpu: list the shaders that work launches, and compile them ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import CompileTimeout, DeviceError, DeviceLost
from wgrad.device.memory import Array
from wgrad.wgsl.runtime import native
from wgrad.wgsl.runtime.compile import Constant, Pipeline, Variant, binding_kinds, source_digest
from wgrad.wgsl.runtime.runtime import Runtime
from wgrad.wgsl.runtime.transfers import SHADER, in_pieces

_PLACEHOLDER_BYTES = 256  # no less than any uniform struct
_THREADS = 16  # that compile at once, at most; the library releases Python's lock


def prepare(device: Runtime, dry: DryRun, progress: Callable[[int, int], None] | None = None) -> int:
    """Compile on `device` what `dry` launched and is not compiled yet; return the number of variants.

    Some drivers (Mesa's lavapipe) generate machine code only at the first dispatch, so each variant is dispatched once
    with no workgroups. `launch` later reports what does not compile. progress: called with (done, in all).
    """
    missing = [v for v in dry.variants if not device._compiler.has(v)]
    device.flush()

    def told(during: bool, number: int) -> None:
        """Report progress during what takes the time: compiling, or the dispatch on a software driver."""
        if progress is not None and during:
            progress(number, len(missing))

    # This thread submits nothing meanwhile, because wgpu's log does not tell whose error it is.
    pipelines: list[Pipeline | None] = []
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        made = [pool.submit(device._compiler.make, variant) for variant in missing]
        for number, (variant, under_way) in enumerate(zip(missing, made)):
            told(not device.software, number)
            try:
                pipelines.append(device._compiler.keep(variant, under_way.result()))
            except (CompileTimeout, DeviceLost):
                raise
            except DeviceError:
                pipelines.append(None)
    finally:
        pool.shutdown(cancel_futures=True)
    buffers: dict[int, Any] = {}
    for number, pipeline in enumerate(pipelines):
        told(device.software, number)
        if pipeline is not None:
            _dispatch_nothing(device, pipeline, buffers)
    if progress is not None:
        progress(len(missing), len(missing))
    return len(missing)


def _dispatch_nothing(device: Runtime, pipeline: Pipeline, buffers: dict[int, Any]) -> None:
    group = device._device.create_bind_group(layout=pipeline.layout, entries=_bind(device, pipeline, buffers))
    device._queue.submit([(pipeline.handle, native.handle(group), 0, 0, 0)])
    device._queue.wait()


def _bind(device: Runtime, pipeline: Pipeline, buffers: dict[int, Any]) -> list[dict[str, Any]]:
    """Bind a small buffer of its own at each binding (written buffers must not alias); no invocation touches it."""
    numbers = (0, *pipeline.bindings)
    for n in numbers:
        if n not in buffers:
            usage = "STORAGE" if n else "UNIFORM"
            buffers[n] = device._device.create_buffer(size=_PLACEHOLDER_BYTES, usage=usage)
    whole = {"offset": 0, "size": _PLACEHOLDER_BYTES}
    return [{"binding": n, "resource": {"buffer": buffers[n], **whole}} for n in numbers]


class DryRun(DryRuntime, Runtime):
    """A `Runtime` that does what `device` would do, without the work itself. Its arrays belong to it alone.

    variants: what was launched, in the order of first use. Downloads return zeros. Launches are not split, which
    changes neither variants nor memory. As on `device`, a launch raises TooLarge if an array does not fit its binding.
    """

    dispatch_work = math.inf

    def __init__(self, device: Runtime) -> None:
        super().__init__()
        self.adapter_type, self.description, self.software = device.adapter_type, device.description, device.software
        self.few_registers, self.subgroup_barrier = device.few_registers, device.subgroup_barrier
        self.float16, self.bfloat16, self.subgroups = device.float16, device.bfloat16, device.subgroups
        self.matrix_units, self.matrix_tile, self.lanes = device.matrix_units, device.matrix_tile, device.lanes
        self.matrix_shape = device.matrix_shape
        self.int8_products, self.transposes_left = device.int8_products, device.transposes_left
        self.max_binding_bytes, self.max_buffer_bytes = device.max_binding_bytes, device.max_buffer_bytes
        self.workgroup_bytes, self.stacks_weights = device.workgroup_bytes, device.stacks_weights
        self.shared_memory, self.host_buffers = device.shared_memory, device.host_buffers
        self.copies_beside, self.scratch_bytes = device.copies_beside, device.scratch_bytes
        self._make_cache()
        self.gemm_plans = {}
        self.variants: dict[Variant, None] = {}

    @property
    def launched(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        return [(v.shader, v.entry, (*v.constants, ("source", source_digest(v)))) for v in self.variants]

    def _create_nothing(self, nbytes: int) -> int:
        self._check_buffer(nbytes)
        return 0

    def transfer(self, src: Array, out: Array) -> None:
        if self.copies_beside and in_pieces(src, out):
            self.variants[SHADER] = None

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
        variant = Variant(shader, entry, tuple((constants or {}).items()))
        self.variants[variant] = None
        if any(array is not None and array.nbytes > self.max_binding_bytes for array in arrays):
            for number in binding_kinds(variant.text):
                if number and (array := arrays[number - 1]) is not None:
                    self._check_binding(variant.name, array.nbytes)
