"""Linear recurrences on HIP are as exact as token by token, however strong the decays are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recurrences import CASES, Recurrence


@pytest.mark.parametrize(("decays", "documents"), CASES)
@pytest.mark.parametrize("op", ["ssd", "delta_rule"])
def test_strong_decays_lose_no_digits(hip_device: Any, op: str, decays: str, documents: int) -> None:
    Recurrence(op).check(hip_device, decays, documents)
