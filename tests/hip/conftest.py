"""The HIP device on an emulated card: builds the emulator and the kernels once, and lends devices of each wave size.

Where clang or hip-python is missing, the tests that need a device are skipped, and say so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.hip.emulator.harness import Emulator, start
from wgrad.device.errors import DeviceError

ARCHITECTURES = ("gfx942", "gfx1100")  # wave64 and wave32


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Built in pytest's cache, where the processes of this run and the next run find it; or in $WGRAD_EMULATOR_DIR."""
    kept, cache = os.environ.get("WGRAD_EMULATOR_DIR"), getattr(pytestconfig, "cache", None)
    folder = Path(kept) if kept else cache.mkdir("emulator") if cache else tmp_path_factory.mktemp("emulator")
    try:
        return start(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    except DeviceError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(params=ARCHITECTURES)
def hip_device(emulator: Emulator, request: pytest.FixtureRequest) -> Any:
    """A device on each wave size. After a kernel that failed, the next test starts anew."""
    yield emulator.device(request.param)
    emulator.clear()


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
