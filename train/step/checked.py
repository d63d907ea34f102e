"""The check of a run's operators before the run (autograd/selftest/verify.py), and what is said of the driver."""

from __future__ import annotations

import platform
from typing import Any

from wgrad.autograd.driver_faults import known_faults
from wgrad.autograd.selftest.verify import verify
from wgrad.device.contract import Device
from wgrad.train.terminal.progress import Display


def fault_notes(device: Device) -> list[str]:
    """Reported faults of the GPU's driver that make results wrong, a line each."""
    found = known_faults(device.facts, platform.system(), platform.release())
    return [f"note: reported of this driver: {fault.text}" for fault in found if fault.kind == "wrong"]


def check_operators(device: Device, dry: Any, display: Display) -> bool:
    """Check what the work on `dry` launches and this GPU has not passed yet. WgradError where it is wrong.

    Returns:
        Whether the device does without some of its kernels from now on: the work is to be planned and checked again.
    """
    with display.phase("checking operators", unit="checks") as phase:
        outcome = verify(device, dry, phase.update)
    if outcome.operators:
        display.say(f"verified {outcome.operators} operators in {outcome.seconds:.1f} s")
    if outcome.off:
        display.say(f"note: {outcome.wrong}: {' and '.join(outcome.off)} stay off on this GPU ({outcome.again})")
    return bool(outcome.off)
