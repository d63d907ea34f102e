"""The self-test's cases of the memory-bound operators on wgpu, and rules that hold for all of them."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tests.case_results import assert_case
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.device.contract import Device
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.operators import implements

ELSEWHERE = {"attention", "attention_backward", "gemm", "linear_quantized", "linear_quantized_backward"}
ELSEWHERE |= {"linear_cross_entropy"}
# test_workgroup_memory.py has poisoned shaders of these, too, which take longest to compile.
POISONED = {"delta_rule", "delta_rule_backward", "ssd", "ssd_backward", "round_weight"}
PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
CASES = [c for c in cases(True) if c.op not in ELSEWHERE]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases_are_within_their_limits(case: Case, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("poisoned_device" if case.op in POISONED else "wgpu_device")
    if "float16" in case.dtype and not device.float16:
        pytest.skip("the device has no float16")
    assert_case(case, device)


def test_storage_of_the_contract_is_there() -> None:
    wanted = {name for name in vars(Device) if not name.startswith("_")}
    assert [name for name in sorted(wanted) if not hasattr(WgpuDevice, name)] == []


def test_an_operators_defaults_do_not_stand_here() -> None:
    for name, function in implements.items():
        parameters = inspect.signature(function).parameters
        assert next(iter(parameters)) == "device"
        assert {(p.kind, p.default) for p in parameters.values()} == {PLAIN}, name


def test_a_new_shape_compiles_nothing(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    """Sizes are run-time arguments: only what changes the variant (width, dtype, divisibility by 4) compiles."""

    def step(rows: int) -> None:
        x = wgpu_device.upload(rng.standard_normal((rows, 64)).astype(np.float32))
        weight = wgpu_device.upload(np.ones(64, np.float32))
        y, rstd = wgpu_device.rms_norm(x, weight, 1e-5)
        wgpu_device.rms_norm_backward(y, x, weight, rstd, residual_grad=y)
        wgpu_device.swiglu_backward(x, y, x)
        wgpu_device.sum_rows(x)
        wgpu_device.grad_norm(wgpu_device.view(x, (x.size,)))
        wgpu_device.softmax(x)

    step(40)
    compiled = wgpu_device.pipelines_compiled()
    for rows in (1, 41, 300, 3000):
        step(rows)
    assert wgpu_device.pipelines_compiled() == compiled
