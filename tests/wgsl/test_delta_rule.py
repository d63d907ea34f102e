"""The gated delta rule in WGSL: in several segments and dispatches, and on a device with little workgroup memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import F32
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.run import check_case
from wgrad.wgsl.delta_rule import delta_rule

CASES = {case.name: case for case in cases() if case.op.startswith("delta_rule") and case.dtype == str(F32)}
FORWARD, BACKWARD = (f"{op}/chunks/1x150x2x4x16x20/float32" for op in ("delta_rule", "delta_rule_backward"))
STATE = "delta_rule/from a state/2x70x1x2x10x6/float32"


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_several_dispatches_give_the_same_bits(name: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ("output", "scan_backward", "grads", "channels") if name == BACKWARD else ("output",)
    shaders = [f"delta_rule_{kernel}" for kernel in ("system", "scan", *kernels)]
    same_bits_in_parts(CASES[name], wgpu_device, monkeypatch, *shaders)


def test_a_sequence_of_several_segments(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states between them are kept for the backward, where there is none given."""
    monkeypatch.setattr(delta_rule, "delta_segment", lambda rows: 64)
    inputs = CASES[BACKWARD].inputs()
    options = {"key_heads": 2, "key_dim": 16}
    dy, _ = inputs.pop("dy"), inputs.pop("states")
    y, states = ReferenceDevice().delta_rule(**inputs, **options)
    wanted = [y, *ReferenceDevice().delta_rule_backward(dy, **inputs, states=states, **options)]
    given = {name: wgpu_device.upload(value) for name, value in inputs.items()}
    y, states = wgpu_device.delta_rule(**given, **options)
    assert states.shape == (3, 1, 4, 16, 20)
    made = [y, *wgpu_device.delta_rule_backward(wgpu_device.upload(dy), **given, states=states, **options)]
    for found, exact in zip(made, wanted):
        np.testing.assert_allclose(wgpu_device.download(found), exact, rtol=2e-4, atol=2e-5)
    assert check_case(CASES[STATE], wgpu_device).ok


def test_little_workgroup_memory_and_few_registers(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_device, "few_registers", True)
    monkeypatch.setattr(wgpu_device, "workgroup_bytes", 16 << 10)
    assert all(check_case(CASES[name], wgpu_device).ok for name in (FORWARD, BACKWARD))
