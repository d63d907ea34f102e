"""The project's gradient checks with the tape on the HIP device: central differences, the operator mid-graph."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from wgrad.autograd import functional as F
from wgrad.autograd.gradcheck import LIMIT, gradcheck
from wgrad.autograd.reference import ReferenceDevice

EPSILON = float(np.finfo(np.float32).eps)


def gradient_tests() -> ModuleType:
    """tests/autograd/test_gradcheck.py, for its cases."""
    path = Path(__file__).parents[1] / "autograd" / "test_gradcheck.py"
    spec = importlib.util.spec_from_file_location("gradient_tests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = gradient_tests()
PLAIN = CASES.gradient_cases(ReferenceDevice(), np.float32)


def difference(name: str, device: Any, op: Any) -> float:
    """Relative difference between float32 gradients on `device` and central differences in float64."""
    exact, shapes = CASES.CASES[name]
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(shape) for shape in shapes]
    return gradcheck(op, *inputs, rng=rng, device=device, dtype=np.float32, differences=exact, checks=12)


@pytest.fixture
def hip_device(emulator: Any) -> Any:
    """One GPU: what depends on the wave size is an operator, and test_operators.py compares each on both."""
    yield emulator.device("gfx1100")
    emulator.clear()


@pytest.mark.parametrize("name", CASES.CASES)
def test_gradient_equals_central_differences(name: str, hip_device: Any) -> None:
    """Within three times the error of plain float32 (as the self-test's backward limit), plus a few roundings."""
    op, _ = CASES.gradient_cases(hip_device, np.float32)[name]
    plain = difference(name, ReferenceDevice(), PLAIN[name][0])
    assert difference(name, hip_device, op) <= 3 * plain + 8 * EPSILON + LIMIT


def test_a_dropped_upstream_gradient_is_found(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hip_device.silu_backward
    ones = hip_device.upload(np.ones((3, 5), np.float32))
    monkeypatch.setattr(hip_device, "silu_backward", lambda dy, x: right(ones, x))
    assert difference("silu", hip_device, F.silu) > 0.01
