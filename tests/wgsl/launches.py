"""The launches of a device while a test runs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import call_case, to_host


def launched(device: Any, monkeypatch: pytest.MonkeyPatch, only: str = "") -> list[str]:
    """The names of the shaders, as they come. only: of the one with this name."""
    names: list[str] = []
    launch = device.launch

    def noted(shader: str, *arguments: Any, **options: Any) -> None:
        if only in ("", shader):
            names.append(shader)
        launch(shader, *arguments, **options)

    monkeypatch.setattr(device, "launch", noted)
    return names


def same_bits_in_parts(case: Case, device: Any, monkeypatch: pytest.MonkeyPatch, *shaders: str) -> None:
    """Assert that a case gives the same bits where each of these is launched in as many dispatches as there can be, and
    that these declare the work of the whole together."""
    works, launch = defaultdict[str, list[float]](list), device.launch

    def noted(shader: str, *arguments: Any, work: float = 0.0, **options: Any) -> None:
        works[shader].append(work)
        launch(shader, *arguments, work=work, **options)

    monkeypatch.setattr(device, "launch", noted)
    outputs = call_case(case, device)  # kept: the others are to lie elsewhere
    whole, before = to_host(case, device, outputs), dict(works)
    works.clear()
    monkeypatch.setattr(device._submission_size, "dispatch_work", 1.0)
    parts = to_host(case, device, call_case(case, device))
    for shader in shaders:
        assert len(works[shader]) > len(before[shader]), shader
        assert sum(works[shader]) == pytest.approx(sum(before[shader])), shader
    assert {name: value.tobytes() for name, value in parts.items()} == {n: v.tobytes() for n, v in whole.items()}
