"""`wgrad doctor`: what keeps this machine from computing on its graphics card, and what to do."""

from __future__ import annotations

from wgrad.autograd.diagnosis import findings, notes
from wgrad.autograd.machine import this_machine
from wgrad.autograd.select_device import select_device


def print_doctor() -> int:
    """A line for each thing that is wrong. -> 0 where nothing is, else 1."""
    machine = this_machine()
    found = findings(machine)
    for line in found:
        print(f"- {line}")
    for line in notes(machine):
        print(f"note: {line}")
    device = select_device("auto")
    print(f"{'nothing is wrong: ' * (not found)}--device auto takes {device.description} ({device.reason})")
    return int(bool(found))
