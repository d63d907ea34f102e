"""The HIP device on an emulated GPU (the fixture `emulator` of tests/conftest.py), of each wave size."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.hip.emulator.harness import Emulator
from wgrad.device.errors import OperatorMissing

ARCHITECTURES = ("gfx942", "gfx1100")  # wave64 and wave32


@pytest.fixture(params=ARCHITECTURES)
def hip_device(emulator: Emulator, request: pytest.FixtureRequest) -> Any:
    """Yield a device of each wave size. After a kernel that failed, the next test gets a new one."""
    yield emulator.device(request.param)
    emulator.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """An operator that has not landed on HIP is declared in hip/elements.py: its tests are skipped."""
    try:
        return (yield)
    except OperatorMissing as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """A failure's report names the order in which work ran."""
    request.node.add_report_section("setup", "emulator", f"WGRAD_EMULATED_SEED={os.environ.get('WGRAD_EMULATED_SEED')}")


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch waits for itself, and says what went wrong in it."""
    monkeypatch.setenv("HIP_LAUNCH_BLOCKING", "1")


@pytest.fixture
def launched(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(source, kernel) of what `hip_device` launches from here on."""
    seen: list[tuple[str, str]] = []
    launch = hip_device.launch

    def watch(source: str, kernel: str, *rest: Any, **more: Any) -> None:
        seen.append((source, kernel))
        launch(source, kernel, *rest, **more)

    monkeypatch.setattr(hip_device, "launch", watch)
    return seen
