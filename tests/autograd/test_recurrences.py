"""Linear recurrences on NumPy and wgpu are as exact as token by token, however strong the decays are; Mamba-1's keeps
the states that its backward needs, and sums over all blocks of channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.recurrences import CASES, Recurrence, check_scan
from wgrad.autograd import functional as F
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, run_backward


@pytest.mark.parametrize(("decays", "documents"), CASES)
@pytest.mark.parametrize("op", ["ssd", "delta_rule"])
def test_strong_decays_lose_no_digits(device: Any, op: str, decays: str, documents: int) -> None:
    Recurrence(op).check(device, decays, documents)


def test_a_selective_scan_keeps_states_and_sums_over_blocks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.wgsl.selective_scan.selective_scan._WORKGROUPS", 1)
    monkeypatch.setattr("wgrad.wgsl.selective_scan.selective_scan._MOST_ROUNDS", 2)  # of three blocks
    check_scan(device, monkeypatch)


def test_a_frozen_weight_of_a_selective_scan_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    device, wanted = ReferenceDevice(), []
    backward = device.selective_scan_backward

    def noted(*arguments: Any, need_dweight: bool) -> Any:
        wanted.append(need_dweight)
        return backward(*arguments, need_dweight=need_dweight)

    monkeypatch.setattr(device, "selective_scan_backward", noted)
    starts, cache_len = np.zeros((1, 3), np.int32), np.zeros(1, np.int32)
    for trained in (False, True):
        x, dt, bc = (Tensor(np.ones((1, 3, 2), np.float32), device, requires_grad=True) for _ in range(3))
        weight = Tensor(np.ones((2, 3), np.float32), device, requires_grad=trained)
        run_backward([F.selective_scan(x, dt, bc, weight, starts, cache_len)], [np.ones((1, 3, 2), np.float32)])
        assert x.grad is not None and (weight.grad is not None) == trained
    assert wanted == [False, True]
