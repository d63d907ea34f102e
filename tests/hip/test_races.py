"""No two waves of a work-group race for memory in kernels that pass results on from one work-item to another.

Kernels that report their accesses show it, whichever wave runs first (tests/hip/emulator/counts.cpp). Results do not:
the emulated GPU stores at once what a real one may hold back until a barrier for all memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.hip.emulator.harness import Emulator
from wgrad.autograd.selftest.case import upload_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.run import to_host

# Two chunks of tokens, and two tiles of keys and of values.
NAMES = [f"{op}/wide/1x70x1x1x72x68/float32" for op in ("delta_rule", "delta_rule_backward", "ssd", "ssd_backward")]
NAMES += ["group_by_expert/300x130x8", "combine_backward/weighted/37x3x67/float16", "sum_rows/129x64/float32"]
BY_NAME = {case.name: case for case in cases()}


@cache
def counting(emulator: Emulator, architecture: str) -> Any:
    """A device whose kernels report their accesses: those that the cases launch."""
    device, wanted = emulator.counting(architecture), set[str]()
    for name in NAMES:
        dry = device.dry_run()
        BY_NAME[name].call(dry, upload_inputs(dry, BY_NAME[name].inputs()))
        wanted |= {kernel for _, kernel in dry.kernels}
    return emulator.counting(architecture, only=wanted)


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100"])
def test_no_two_waves_race(
    emulator: Emulator, blocking: None, monkeypatch: pytest.MonkeyPatch, architecture: str, name: str
) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", architecture)
    device, case = counting(emulator, architecture), BY_NAME[name]
    counts = emulator.count(lambda: to_host(case, device, case.call(device, upload_inputs(device, case.inputs()))))
    assert any(found.sites for found in counts.values())  # those that do not report would race unseen
