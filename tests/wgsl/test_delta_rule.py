"""The gated delta rule and Mamba-2's recurrence in WGSL: in several segments and dispatches, and on a device with
little workgroup memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import delta_rule as rule_cases
from wgrad.autograd.selftest import ssd as ssd_cases
from wgrad.autograd.selftest.case import F32
from wgrad.autograd.selftest.run import check_case
from wgrad.device import contract

CASES = {case.name: case for case in (*rule_cases.cases(F32), *ssd_cases.cases(F32))}
FORWARD, BACKWARD, SSD_BACKWARD = (
    f"{op}/chunks/1x150x2x4x16x20/float32" for op in ("delta_rule", "delta_rule_backward", "ssd_backward")
)
STATE = "from a state/2x70x1x2x10x6/float32"
OF_CHUNKS = tuple(f"delta_rule_{kernel}" for kernel in ("system", "scan", "output"))
BACK = (*OF_CHUNKS, "delta_rule_scan_backward")


@pytest.mark.parametrize(
    ("name", "shaders"),
    [
        (FORWARD, OF_CHUNKS),
        (BACKWARD, (*BACK, "delta_rule_grads", "delta_rule_channels")),
        (SSD_BACKWARD, (*BACK, "ssd_grads", "ssd_channels")),
    ],
)
def test_several_dispatches_give_the_same_bits(
    name: str, shaders: tuple[str, ...], poisoned_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the shaders of test_memory_ops.py, which take seconds to compile."""
    same_bits_in_parts(CASES[name], poisoned_device, monkeypatch, *shaders)


@pytest.mark.parametrize(
    ("op", "options"),
    [("delta_rule", {"key_heads": 2, "key_dim": 16}), ("ssd", {"groups": 2, "state_dim": 16})],
)
def test_several_segments_are_within_the_limits(
    op: str, options: dict[str, int], poisoned_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states between them are kept for the backward, where there is none given."""
    assert contract.delta_segments(16, 2048 + 65) == [(0, 32), (2048, 2)]
    monkeypatch.setattr(contract, "delta_segment", lambda rows: 64)
    inputs, exact = CASES[f"{op}_backward/chunks/1x150x2x4x16x20/float32"].inputs(), ReferenceDevice()
    dy, _ = inputs.pop("dy"), inputs.pop("states")
    y, states = getattr(exact, op)(**inputs, **options)
    wanted = [y, *getattr(exact, f"{op}_backward")(dy, **inputs, states=states, **options)]
    given = {name: poisoned_device.upload(value) for name, value in inputs.items()}
    y, states = getattr(poisoned_device, op)(**given, **options)
    assert states.shape == (3, 1, 4, 16, 20)
    back = getattr(poisoned_device, f"{op}_backward")
    made = [y, *back(poisoned_device.upload(dy), **given, states=states, **options)]
    for found, value in zip(made, wanted):
        np.testing.assert_allclose(poisoned_device.download(found), value, rtol=2e-4, atol=2e-5)
    assert_case(CASES[f"{op}/{STATE}"], poisoned_device)


def test_little_workgroup_memory_and_few_registers_suffice(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_device, "few_registers", True)
    monkeypatch.setattr(wgpu_device, "workgroup_bytes", 16 << 10)
    assert all(check_case(CASES[name], wgpu_device).ok for name in (FORWARD, BACKWARD, SSD_BACKWARD))
