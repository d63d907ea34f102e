"""Every variant stays within what WebGPU promises on every device, or what a profile says: workgroup memory,
invocations, storage buffers. Texts alone: nothing is compiled."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.wgsl.workgroup_poison import parts, variables
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest import delta_rule, experts, selective_scan, ssd
from wgrad.autograd.selftest.case import F32, Case, upload_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.device.errors import WgradError
from wgrad.wgsl.runtime import adapters
from wgrad.wgsl.webgpu_trace import PROFILES, TraceDevice

INVOCATIONS = 256  # WebGPU's least, as are 16 KiB of workgroup memory
FEWER_BUFFERS = 8  # likewise; GEMMs with every epilogue have more
BYTES = {"f32": 4, "u32": 4, "i32": 4, "f16": 2, "atomic<u32>": 4, "vec3<u32>": 16}
VECTOR = re.compile(r"vec([24])<(\w+)>")


class Text:
    """Numbers and types that an assembled text declares."""

    def __init__(self, code: str) -> None:
        self.code, self.numbers = code, dict[str, int]()
        for name, value in re.findall(r"const (\w+)(?:: u32)? = ([^;]+);", code):
            with suppress(NameError, SyntaxError, TypeError):  # of another type
                self.numbers[name] = self.number(value)

    def number(self, words: str) -> int:
        plain = re.sub(r"\b(\d+)u\b", r"\1", words).replace("/", "//")
        return int(eval(plain, {"min": min, "max": max}, self.numbers))

    def size(self, kind: str) -> int:
        if vector := VECTOR.fullmatch(kind):
            return int(vector[1]) * BYTES[vector[2]]
        if kind.startswith("array<"):
            element, count = parts(kind[len("array<") : -1])
            return self.size(element) * self.number(count)
        if struct := re.search(rf"struct {kind} \{{([^}}]*)\}}", self.code):
            return sum(self.size(field.partition(":")[2].strip()) for field in parts(struct[1]))
        if alias := re.search(rf"alias {kind} = (.*);", self.code):
            return self.size(alias[1])
        return BYTES[kind]

    @property
    def workgroup_bytes(self) -> int:
        return sum(self.size(variable.type) for variable in variables(self.code))

    @property
    def invocations(self) -> int:
        sides = re.findall(r"@workgroup_size\(([^)]*)\)", self.code)
        return max(math.prod(self.number(side) for side in sizes.split(",")) for sizes in sides)


def check(listed: list[Case], profile: Any, few_registers: bool) -> dict[str, int]:
    """Check the cases' shaders, and return the number of storage buffers of each."""
    buffers: dict[str, int] = {}
    like = None
    for case in listed:
        device = bind(TraceDevice)(profile, like)
        like, device.few_registers = like or device, few_registers
        try:
            case.call(device, upload_inputs(device, case.inputs()))
        except WgradError:  # what the device does not have
            continue
        device.flush()
        for shader in device.trace.shaders:
            text = Text(shader.code)
            assert text.workgroup_bytes <= profile.workgroup_bytes, shader.label
            assert text.invocations <= INVOCATIONS, shader.label
            bound = sum(kind != "uniform" for _, kind in shader.bindings)
            buffers[shader.label] = max(buffers.get(shader.label, 0), bound)
    return buffers


def test_newer_kernels_are_within_the_default_limits() -> None:
    """Kernels of DeltaNet, Mamba and experts need no subgroups either, which no trace has."""
    families = (delta_rule, ssd, selective_scan, experts)
    listed = [case for family in families for case in family.cases(F32)]
    buffers = check(listed, PROFILES[0], few_registers=False)
    assert {"delta_rule_grads", "ssd_grads", "selective_scan_grads", "moe_weight_grad", "moe_route"} <= set(buffers)
    assert {name for name, count in buffers.items() if count > FEWER_BUFFERS} <= {"gemm"}


def test_the_page_on_gpus_says_what_is_needed() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/gpus.md").read_text(encoding="utf-8")
    assert f"| storage buffers of a shader | {adapters.STORAGE_BUFFERS} (WebGPU: {FEWER_BUFFERS}) |" in page
    assert f"| workgroup memory | {PROFILES[0].workgroup_bytes >> 10} KiB |" in page
    assert f"| invocations of a workgroup | {INVOCATIONS} |" in page


@pytest.mark.all
@pytest.mark.parametrize("few_registers", [False, True])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_kernels_are_within_the_limits_of_a_profile(profile: Any, few_registers: bool) -> None:
    buffers = check(cases(), profile, few_registers)
    assert max(buffers.values()) <= adapters.STORAGE_BUFFERS
    assert {name for name, count in buffers.items() if count > FEWER_BUFFERS} <= {"gemm", "gemm_direct", "gemv"}
