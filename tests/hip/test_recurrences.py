"""Linear recurrences on HIP are as exact as token by token, however strong the decays are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.recurrences import CASES, Recurrence, check_scan
from wgrad.autograd.ops import delta_rule, ssd
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import upload_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.device import contract


@pytest.mark.parametrize(("decays", "documents"), CASES)
@pytest.mark.parametrize("op", ["ssd", "delta_rule"])
def test_strong_decays_lose_no_digits(hip_device: Any, op: str, decays: str, documents: int) -> None:
    Recurrence(op).check(hip_device, decays, documents)


@pytest.mark.parametrize("op", ["ssd", "delta_rule"])
def test_states_before_segments_have_all_values_of_wide_heads(
    hip_device: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (contract, delta_rule, ssd):
        monkeypatch.setattr(module, "delta_segment", lambda rows: contract.DELTA_CHUNK)
    case = next(case for case in cases() if case.name.startswith(f"{op}/wide"))  # 70 tokens, 68 values
    inputs = case.inputs()
    widths = {"key_heads": 1, "key_dim": 72} if op == "delta_rule" else {"groups": 1, "state_dim": 72}

    def states(device: Any) -> np.ndarray:
        return device.download(getattr(device, op)(**upload_inputs(device, inputs), **widths)[1])

    found, wanted = states(hip_device), states(ReferenceDevice())
    assert found.shape == (2, 1, 1, 72, 68)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_selective_scan_keeps_states_and_sums_over_blocks(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.hip.selective_scan.selective_scan._WORKGROUPS", 1)
    monkeypatch.setattr("wgrad.hip.selective_scan.selective_scan._MOST_ROUNDS", 2)  # of three blocks
    check_scan(hip_device, monkeypatch)
