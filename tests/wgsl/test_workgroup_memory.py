"""No shader relies on workgroup memory that begins as zeros: each that has any gives its results, within the limits of
the self-test, where it begins as infinities and ones (workgroup_poison.py). What a shader that reads them loses in time
alone shows in one place, where it was seen: the rescaling of attention's sums."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.matrix_emulation import emulated, with_matrix_units
from tests.wgsl.shader_files import SHADERS, SHARED
from tests.wgsl.workgroup_cases import BY_NAME, CASES, declared, prepare, use_small_tiles
from tests.wgsl.workgroup_poison import Variable, poisoned, variables
from wgrad.wgsl.roofline import roofs
from wgrad.wgsl.runtime import compile as wgsl_compile
from wgrad.wgsl.runtime import cooperative

_ROOF, _PROBE, _FUSED = "roof_matrix", "cooperative_probe", "fused"  # no operators, so no cases
# The tiles of the first leave no room for nested scales; the second fills a codebook's table as quantize_decode does.
_NEVER = {"gemm": {"table"}, "gemm_int8_pack": {"table"}}


@dataclass
class Poisoned:
    """A device with a GPU's ways and tensor cores, all of whose shaders are poisoned. entries: those launched, and
    variables: those filled, by shader."""

    device: Any
    entries: dict[str, set[str]] = field(default_factory=dict)
    variables: dict[str, set[Variable]] = field(default_factory=dict)


@cache
def _poisoned() -> Poisoned:
    return Poisoned(with_matrix_units())


@pytest.fixture
def on(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> Poisoned:
    use_small_tiles(monkeypatch)
    on = _poisoned()
    plain, launch = wgsl_compile.assemble, on.device.launch
    launched = ""

    def assemble(source: str, constants: dict) -> str:
        text = plain(source, constants)
        on.variables.setdefault(launched, set()).update(variables(text))
        return poisoned(emulated(text, constants.get("LANES", 32)))

    def noted(shader: str, *arguments: Any, entry: str = "main", **options: Any) -> None:
        nonlocal launched
        launched = shader
        on.entries.setdefault(shader, set()).add(entry)
        launch(shader, *arguments, entry=entry, **options)

    monkeypatch.setattr(wgsl_compile, "assemble", assemble)
    monkeypatch.setattr(on.device, "launch", noted)
    return on


def test_every_shader_with_workgroup_memory_is_listed() -> None:
    launched = {file.removesuffix(".wgsl") for file in set(SHADERS) - SHARED}
    with_memory = {shader for shader in launched if declared(shader)}
    assert with_memory == {*CASES, _ROOF, _PROBE, _FUSED}, "name self-test cases of each in CASES"


@pytest.mark.parametrize("shader", CASES)
def test_kernels_never_read_memory_that_they_have_not_written(
    shader: str, on: Poisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "matrix" in shader and not on.device.float16:
        pytest.skip("the device has no float16")
    prepare(shader, on.device, monkeypatch)
    for name in CASES[shader]:
        assert_case(BY_NAME[name], on.device)
    missing = declared(shader) - on.variables[shader]
    if shader == "gemv":  # adds up by shuffles where there are any, or else in workgroup memory alone
        monkeypatch.setattr(on.device, "subgroups", False)
        assert_case(BY_NAME[CASES[shader][0]], on.device)
        missing = {v for v in declared(shader) - on.variables[shader] if "SLOTS" not in v.type}
    assert {v.name for v in missing} <= _NEVER.get(shader, set()), "no case takes a variant that has these"
    entries = set(re.findall(r"@compute.*\nfn (\w+)", SHADERS[f"{shader}.wgsl"]))
    assert entries == on.entries[shader], "no case launches the others"


def test_sums_are_rescaled_for_what_subgroups_wrote_alone(on: Poisoned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of zeros: no row's maximum grows, so the rescaling, which is made wrong here, must not run. Right results
    do not show that it runs for nothing, as it did at every tile where other kernels had left something."""
    if not on.device.float16:
        pytest.skip("the device has no float16")
    poison, changed = wgsl_compile.assemble, []

    def assemble(source: str, constants: dict) -> str:
        text = poison(source, constants)
        changed.append("*= shrink" in text)
        return text.replace("*= shrink", "*= 3.0")

    monkeypatch.setattr(wgsl_compile, "assemble", assemble)
    device = with_matrix_units()
    q, ones = device.zeros((1, 70, 1, 32), np.float16), device.upload(np.ones((1, 70, 1, 32), np.float16))
    doc_start, cache_len = device.zeros((1, 70), np.int32), device.zeros((1,), np.int32)
    o, _ = device.attention(q, ones, ones, doc_start, cache_len, scale=1.0)
    np.testing.assert_allclose(device.download(o), 1.0, atol=2.0**-10)
    assert any(changed)


def test_the_roofline_of_tensor_cores_touches_all_its_memory(on: Poisoned) -> None:
    if not on.device.float16:
        pytest.skip("the device has no float16")
    factors = ((np.arange(6 * 256) % 13) / 16).reshape(6, 16, 16)
    total = sum(factors[i] @ factors[2 + j] for i in range(2) for j in range(4))
    found = on.device.download(roofs.matrix_multiply_adds(on.device, 1, 1))
    np.testing.assert_allclose(found, np.broadcast_to(total, found.shape), rtol=1e-6)
    assert on.variables[_ROOF] == declared(_ROOF)


def test_the_probe_of_cooperative_matrices_touches_all_its_memory(on: Poisoned) -> None:
    if not on.device.float16:
        pytest.skip("the device has no float16")
    assert cooperative.lanes_of(on.device) == 32
    assert on.variables[_PROBE] == declared(_PROBE)
