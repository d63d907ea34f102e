"""`wgrad doctor`: why this machine does not compute on its GPU, and what to do."""

from __future__ import annotations

from wgrad.autograd.diagnosis import findings, notes
from wgrad.autograd.machine import this_machine
from wgrad.autograd.select_device import select_device


def print_doctor() -> int:
    """Print a line for each problem. Return 0 if there are none, else 1."""
    machine = this_machine()
    found = findings(machine)
    for line in found:
        print(f"- {line}")
    for line in notes(machine):
        print(f"note: {line}")
    device = select_device("auto")
    print(f"{'nothing is wrong: ' * (not found)}--device auto takes {device.description} ({device.reason})")
    return int(bool(found))
