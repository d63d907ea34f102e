"""Bundles of cases with all that another implementation of WebGPU needs to run and judge them: shaders, buffers, steps,
inputs, expected outputs and limits. Writing one needs no device.

A bundle is a JSON document and a block of bytes:

    shaders   label, entry, code, bindings [[number, type]], storage (bindings that are storage), workgroup_bytes of the
              profile, float16
    cases     name, op, direction, dtype, shape, profile, float16, finish
              buffers   [[bytes, is uniform]]; their initial contents are undefined
              steps     ["write", buffer, offset, at, bytes] or
                        ["run", shader, [[number, buffer, offset, bytes]], [x, y, z]], in order
              made      {name, buffer, offset, size, dtype}: outputs on the device, from which `finish` computes those
                        that are judged
              expected  {name, at, size, dtype, limit}: outputs of the oracle, float32 or integers, and the largest
                        difference allowed

`at` counts bytes in the block. wgsl/bundle_runner.mjs runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import wgrad
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.case import Case, Inputs, upload_inputs
from wgrad.autograd.selftest.run import expected_outputs
from wgrad.wgsl.webgpu_trace import PROFILES, RUNNER, Profile, Shader, Trace, TraceDevice, Write

FORMAT = 1
CARDS = tuple(profile for profile in PROFILES if not profile.software)


@dataclass
class Bundle:
    """A bundle: a JSON document, and the block of bytes to which its offsets refer."""

    document: dict[str, Any]
    block: bytes


@dataclass
class _Block:
    """A block of bytes. Each piece starts at a multiple of 4, and equal pieces are stored once."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    places: dict[bytes, int] = field(default_factory=dict)

    def put(self, data: bytes) -> int:
        key = hashlib.sha256(data).digest()
        if key not in self.places:
            self.places[key] = self.size
            padded = data + bytes(-len(data) % 4)
            self.parts.append(padded)
            self.size += len(padded)
        return self.places[key]


class _Writer:
    def __init__(self) -> None:
        self.block = _Block()
        self.shaders: dict[Shader, int] = {}
        self.workgroup_bytes: list[int] = []
        self.cases: list[dict[str, Any]] = []
        self.device: Any = None  # the first device, whose assembled shaders the others reuse

    def add(self, case: Case, inputs: Inputs, profile: Profile, *, only_new: bool) -> None:
        """Add a case. only_new: skip it if the bundle has all variants that it launches."""
        device = bind(TraceDevice)(profile, self.device)
        self.device = self.device or device
        outputs = case.call(device, upload_inputs(device, inputs))
        places = {name: device.place(array) for name, array in outputs.items()}
        trace = device.trace
        if only_new and all(shader in self.shaders for shader in trace.shaders):
            return
        for shader in trace.shaders:
            if shader not in self.shaders:
                self.shaders[shader] = len(self.shaders)
                self.workgroup_bytes.append(profile.workgroup_bytes)
        made = [
            {"name": n, "buffer": at, "offset": offset, "size": outputs[n].size, "dtype": outputs[n].dtype.name}
            for n, (at, offset) in places.items()
        ]
        known = {n: getattr(case, n) for n in ("name", "op", "direction", "dtype", "shape", "finish")}
        self.cases.append(
            {
                **known,
                "profile": profile.name,
                "float16": any(shader.float16 for shader in trace.shaders),
                "buffers": _sizes(trace),
                "steps": self._steps(trace),
                "made": made,
                "expected": self._expected(case, inputs),
            }
        )

    def _steps(self, trace: Trace) -> list[Any]:
        steps: list[Any] = []
        for step in trace.steps:
            if isinstance(step, Write):
                steps.append(["write", step.buffer, step.offset, self.block.put(step.data), len(step.data)])
            else:
                bindings = [dataclasses.astuple(b) for b in step.bindings]
                steps.append(["run", self.shaders[step.shader], bindings, step.groups])
        return steps

    def _expected(self, case: Case, inputs: Inputs) -> list[dict[str, Any]]:
        expected, found = expected_outputs(case, inputs), []
        for name, value in expected.oracle.items():
            whole = np.uint32 if value.dtype == np.uint32 else np.int32
            kept = value.astype(whole if value.dtype.kind in "iu" else np.float32)
            at = self.block.put(kept.tobytes())
            shown = {"name": name, "at": at, "size": kept.size, "dtype": kept.dtype.name}
            found.append({**shown, "limit": expected.limits[name]})
        return found

    def document(self) -> dict[str, Any]:
        shaders = [
            {
                **dataclasses.asdict(shader),
                "storage": sum(kind != "uniform" for _, kind in shader.bindings),
                "workgroup_bytes": nbytes,
                "float16": shader.float16,
            }
            for shader, nbytes in zip(self.shaders, self.workgroup_bytes)
        ]
        return {"format": FORMAT, "wgrad": wgrad.__version__, "shaders": shaders, "cases": self.cases}


def _sizes(trace: Trace) -> list[tuple[int, bool]]:
    """Return for each buffer its size, and whether it holds uniforms.

    A buffer of uniforms is allocated for a thousand launches. Its unused end is cut off.
    """
    used = [0] * len(trace.buffers)
    for step in trace.steps:
        ends = (
            [(step.buffer, step.offset + len(step.data))]
            if isinstance(step, Write)
            else [(b.buffer, b.offset + b.nbytes) for b in step.bindings]
        )
        for buffer, end in ends:
            used[buffer] = max(used[buffer], end)
    return [(used[i] if uniform else nbytes, uniform) for i, (nbytes, uniform) in enumerate(trace.buffers)]


def runner_source() -> str:
    """Return the source of the ES module that runs a bundle."""
    return RUNNER.read_text(encoding="utf-8")


def _input_bytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values())


class _Coarse(np.random.Generator):
    """A generator that rounds large normal arrays to steps of 1/8, which compress well and test as much."""

    def standard_normal(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = super().standard_normal(size, *args, **kwargs)
        return np.round(value * 8) / 8 if np.size(value) >= 4096 else value


def with_coarse_inputs(case: Case) -> Case:
    """Return the case with inputs that are small enough for a web page."""
    return dataclasses.replace(case, build=lambda rng: case.build(_Coarse(rng.bit_generator)))


def make_bundle(
    cases: Iterable[Case],
    *,
    profiles: Sequence[Profile] = PROFILES,
    smallest: bool = False,
    only: Collection[tuple[str, str]] | None = None,
) -> Bundle:
    """Bundle all cases for the first profile, and for each other profile those that launch variants of its own.

    smallest: skip every case without a new variant, and begin with the cases with the smallest inputs.
    only: pairs of case and profile names; bundle exactly these instead.
    """
    writer, listed = _Writer(), [case for case in cases if only is None or any(case.name == name for name, _ in only)]
    made: Iterable[tuple[Case, Inputs]] = ((case, case.inputs()) for case in listed)
    for case, inputs in sorted(made, key=lambda pair: _input_bytes(pair[1])) if smallest else made:
        for i, profile in enumerate(profiles):
            if only is None or (case.name, profile.name) in only:
                writer.add(case, inputs, profile, only_new=only is None and (smallest or i > 0))
    places = {case.name: i for i, case in enumerate(listed)}
    writer.cases.sort(key=lambda one: places[one["name"]])
    return Bundle(writer.document(), b"".join(writer.block.parts))
