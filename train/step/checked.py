"""Check of a run's operators before it starts (autograd/selftest/verify.py), and notes on known driver faults."""

from __future__ import annotations

import platform
from typing import Any

from wgrad.autograd.driver_faults import known_faults
from wgrad.autograd.selftest.verify import verify
from wgrad.device.contract import Device
from wgrad.device.shown import counted
from wgrad.train.terminal.progress import Display


def fault_notes(device: Device) -> list[str]:
    """Return a note for each known fault of the GPU's driver that makes results wrong."""
    found = known_faults(device.facts, platform.system(), platform.release())
    return [f"note: reported of this driver: {fault.text}" for fault in found if fault.kind == "wrong"]


def check_operators(device: Device, dry: Any, display: Display) -> bool:
    """Check the operators of a dry run that this GPU has not passed yet.

    Returns:
        Whether the device stopped using some of its kernels, so that the work must be planned and checked again.

    Raises:
        WgradError: An operator gives wrong results.
    """
    with display.phase("checking operators", unit="checks") as phase:
        outcome = verify(device, dry, phase.update)
    if outcome.operators:
        display.say(f"verified {counted(outcome.operators, 'operator')} in {outcome.seconds:.1f} s")
    if outcome.off:
        display.say(f"note: {outcome.wrong}: {' and '.join(outcome.off)} stay off on this GPU ({outcome.again})")
    return bool(outcome.off)
