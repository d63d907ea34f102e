"""The dry run of the HIP device: it names the kernels that the device would look up, and takes its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgrad.autograd.selftest.case import Case, upload_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.run import prepare_selftest


def chosen() -> list[Case]:
    return [case for case in cases() if case.name.startswith(("silu/", "rms_norm/", "rope/"))]


def test_it_names_the_kernels_that_are_looked_up(hip_device: Any) -> None:
    dry = hip_device.dry_run()
    for case in chosen():
        case.call(dry, upload_inputs(dry, case.inputs()))
    looked_up: set[tuple[str, str]] = set()
    get = hip_device.modules.get

    def note(source: str, kernel: str) -> Any:
        looked_up.add((source, kernel))
        return get(source, kernel)

    hip_device.modules.get = note
    try:
        for case in chosen():
            case.call(hip_device, upload_inputs(hip_device, case.inputs()))
    finally:
        del hip_device.modules.get
    assert set(dry.kernels) == looked_up and len(looked_up) >= 3
    assert prepare_selftest(hip_device, chosen()) == 0


def test_it_is_as_its_device_is(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.device("gfx1100")
    monkeypatch.setattr(device, "attention_rounding", "rtz")
    monkeypatch.setattr(device, "shared_memory", True)
    emulator.device("gfx942")  # the GPU that the driver now names
    dry = device.dry_run()
    assert (dry.architecture, dry.wave, dry.attention_rounding, dry.shared_memory) == ("gfx1100", 32, "rtz", True)


def test_it_takes_the_memory_that_the_device_takes(hip_device: Any) -> None:
    def work(device: Any) -> None:
        x = device.upload(np.ones((123, 64), np.float32))
        with device.capture():
            y = device.gemm(x, x, trans_b=True)
            y = device.silu(y)

    dry = hip_device.dry_run()
    hip_device.trim()
    hip_device.reset_peak()
    before = hip_device.memory()
    work(dry)
    assert hip_device.memory() == before
    work(hip_device)
    memory = hip_device.memory()
    assert dry.memory().peak_bytes == memory.peak_bytes - before.in_use_bytes > 50_000
    np.testing.assert_array_equal(dry.download(dry.zeros((3, 5))), np.zeros((3, 5)))
