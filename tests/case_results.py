"""Assertions on the results of self-test cases."""

from __future__ import annotations

from typing import Any

from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import Result, check_case


def assert_ok(result: Result) -> None:
    """Fail with the case, the output, its error and its limit if a result is not within its limit."""
    off = f"{result.name}: {result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"
    assert result.ok, f"{off} {result.message}"


def assert_case(case: Case, device: Any) -> None:
    """Run a case on a device, and fail if its result is not within its limit."""
    assert_ok(check_case(case, device))
