"""A device without a driver: it records what the wgpu device would ask of WebGPU, and computes nothing.

The operators run as on a GPU: shaders are assembled, buffers are numbers, and every write and dispatch becomes a step
of a list. Any WebGPU implementation that runs these steps computes the outputs. So other compilers than wgpu's are
tested (autograd/selftest/bundle.py, bundle_runner.mjs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime.compile import Compiler, Pipeline, Variant

RUNNER = Path(__file__).with_name("bundle_runner.mjs")


@dataclass(frozen=True)
class Profile:
    """Device properties that decide which kernels are used."""

    name: str
    workgroup_bytes: int
    software: bool = False


# WebGPU's least workgroup memory, that of most GPUs, that of NVIDIA's; and the kernels of software drivers.
PROFILES = (
    Profile("16 KiB", 16 << 10),
    Profile("32 KiB", 32 << 10),
    Profile("48 KiB", 48 << 10),
    Profile("software", 32 << 10, software=True),
)


@dataclass(frozen=True)
class Shader:
    """One variant. bindings: (number, "uniform" | "read-only-storage" | "storage"), in order."""

    label: str
    entry: str
    code: str
    bindings: tuple[tuple[int, str], ...]

    @property
    def float16(self) -> bool:
        return "enable f16;" in self.code


class _Object:
    """A stand-in for an object of wgpu-py, of which native.handle() takes `_internal`."""

    @property
    def _internal(self) -> Any:
        return self


class Buffer(_Object):
    """serial: its index in Trace.buffers."""

    def __init__(self, serial: int) -> None:
        self.serial = serial

    def destroy(self) -> None:
        return None


class _Held(_Object):
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Write:
    buffer: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Binding:
    number: int
    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Dispatch:
    shader: Shader
    bindings: tuple[Binding, ...]
    groups: tuple[int, int, int]


@dataclass
class Trace:
    """buffers: (bytes, is uniform). steps: in the order of the queue."""

    buffers: list[tuple[int, bool]] = field(default_factory=list)
    steps: list[Write | Dispatch] = field(default_factory=list)

    @property
    def shaders(self) -> list[Shader]:
        return list(dict.fromkeys(step.shader for step in self.steps if isinstance(step, Dispatch)))


class _Recorder:
    """The parts of a wgpu device and its queue that the runtime and compiler use (submission_queue.py)."""

    lost = None

    def __init__(self, profile: Profile, trace: Trace) -> None:
        self.trace = trace
        self.features = {"shader-f16"}
        self.limits = {
            "max-storage-buffer-binding-size": 128 << 20,
            "max-buffer-size": 256 << 20,
            "max-compute-workgroup-storage-size": profile.workgroup_bytes,
        }

    # ---- the device ----------------------------------------------------------------------
    def create_buffer(self, *, size: int, usage: str) -> Buffer:
        self.trace.buffers.append((size, "UNIFORM" in usage))
        return Buffer(len(self.trace.buffers) - 1)

    def create_shader_module(self, *, label: str, code: str) -> _Held:
        return _Held((label, code))

    def create_bind_group_layout(self, *, entries: Sequence[dict[str, Any]]) -> _Held:
        return _Held(tuple((entry["binding"], entry["buffer"]["type"]) for entry in entries))

    def create_pipeline_layout(self, *, bind_group_layouts: Sequence[_Held]) -> _Held:
        return bind_group_layouts[0]

    def create_compute_pipeline(self, *, label: str, layout: _Held, compute: dict[str, Any]) -> _Held:
        _, code = compute["module"].value
        return _Held(Shader(label, compute["entry_point"], code, layout.value))

    def create_bind_group(self, *, layout: _Held, entries: Sequence[dict[str, Any]]) -> _Held:
        parts = ((entry["binding"], entry["resource"]) for entry in entries)
        return _Held(tuple(Binding(n, r["buffer"].serial, r["offset"], r["size"]) for n, r in parts))

    # ---- the queue -----------------------------------------------------------------------
    def submit(self, dispatches: Iterable[tuple[_Held, _Held, int, int, int]], *_: Any) -> None:
        for pipeline, group, x, y, z in dispatches:
            self.trace.steps.append(Dispatch(pipeline.value, group.value, (x, y, z)))

    def write(self, buffer: Buffer, offset: int, data: Any) -> None:
        self.trace.steps.append(Write(buffer.serial, offset, bytes(memoryview(data).cast("B"))))

    def drain(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def read_later(self, buffer: Buffer, offset: int, nbytes: int) -> Any:
        raise DeviceError("a traced device computes nothing: what is read in the middle of a trace has no value")


class _TextCompiler(Compiler):
    """Assembles texts, without a thread: there is no driver that may hang."""

    def make(self, variant: Variant) -> Pipeline:
        return self._compile(variant)


class TraceDevice(WgpuDevice):
    """A device whose `trace` grows with every write and launch. Use one device per bundle.

    like: another, whose assembled pipelines this one shares.
    """

    def __init__(self, profile: Profile, like: TraceDevice | None = None) -> None:
        self.trace, self._like = Trace(), like
        recorder = _Recorder(profile, self.trace)
        kind = "CPU" if profile.software else "DiscreteGPU"
        info = {"device": "no device", "adapter_type": kind, "backend_type": "trace", "description": profile.name}
        self._start(recorder, recorder, info, None)

    def _new_compiler(self) -> Compiler:
        return _TextCompiler(self._device) if self._like is None else self._like._compiler

    def place(self, array: Array) -> tuple[int, int]:
        """(buffer, offset in bytes) of an array, after everything that was launched is in the trace."""
        self.flush()
        return array.lease.block.buffer.serial, array.offset
