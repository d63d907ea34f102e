"""Mixture of experts on wgpu: the bounds of its launches, and rows of few tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.selftest.case import F32
from wgrad.autograd.selftest.experts import grouped_case


@pytest.mark.parametrize(("direction", "shader"), [("forward", "gemm"), ("weight_grad", "moe_weight_grad")])
def test_launches_in_parts(direction: str, shader: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = grouped_case(direction, "parts", (131, 5, 2, 136, 72), F32, gather=True)
    same_bits_in_parts(case, wgpu_device, monkeypatch, shader)
