"""Linear recurrences on NumPy and wgpu are as exact as token by token, however strong the decays are; Mamba-1's keeps
the states that its backward needs, and sums over all blocks of channels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recurrences import CASES, Recurrence, check_scan


@pytest.mark.parametrize(("decays", "documents"), CASES)
@pytest.mark.parametrize("op", ["ssd", "delta_rule"])
def test_strong_decays_lose_no_digits(device: Any, op: str, decays: str, documents: int) -> None:
    Recurrence(op).check(device, decays, documents)


def test_a_selective_scan_keeps_states_and_sums_over_blocks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.wgsl.selective_scan.selective_scan._WORKGROUPS", 1)
    check_scan(device, monkeypatch)
