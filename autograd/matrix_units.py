"""Tensor cores of the wgpu device: status, enabling (with a self-check in a separate process) and disabling."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.matrix import trusted_cases
from wgrad.autograd.selftest.probe import Verdict, check_in_a_process, report
from wgrad.device.errors import DeviceError

_IDLE = "the GPU's tensor cores are idle"
_GAIN = "steps 2.9 to 6.6 times as fast (135M to 8B, measured on an H200)"  # bench/notes/tensor-cores.md


@dataclass(frozen=True)
class Card:
    """An adapter that lists tensor cores."""

    index: int
    name: str
    card: str  # identity of GPU and driver
    passed: bool | None  # whether their check passed; None: not tried with these kernels and this driver
    reason: str
    given: bool  # whether the installed library offers them, without a copy


@dataclass(frozen=True)
class Status:
    """State of tensor cores on this machine."""

    library: str  # the installed one
    sha256: str
    known: bool  # whether its gate is found
    copy: str
    copied: bool
    loaded: bool  # whether this process runs on the copy
    switched_off: bool
    cards: list[Card]


def _units() -> Any:
    return importlib.import_module("wgrad.wgsl.runtime.matrix_units")


def status() -> Status:
    """Return the state of tensor cores without changing anything. DeviceError: adapters cannot be listed."""
    units, adapters = _units(), importlib.import_module("wgrad.wgsl.runtime.adapters")
    native = importlib.import_module("wgrad.wgsl.runtime.native")
    library = units.installed()
    cards = []
    for card in adapters.matrix_unit_cards():
        passed, reason = units.verdict(card["card"]) or (None, "")
        given = not native.COPY_LOADED and adapters.gives_matrix_units(card["index"])
        cards.append(Card(card["index"], card["name"], card["card"], passed, reason, given))
    return Status(
        library=str(library or ""),
        sha256=units.sha256(library) if library else "",
        known=library is not None and units.gate_of(library) is not None,
        copy=str(units.copy_path()),
        copied=units.copy_path().exists(),
        loaded=native.COPY_LOADED,
        switched_off=os.environ.get(units.SWITCH) == "off",
        cards=cards,
    )


def idle(device: Any) -> str:
    """Return why a GPU with tensor cores runs without them, and what to do; "": it does not."""
    return _why_idle(device)[0]


def left_idle(device: Any) -> str:
    """Return the text of `idle` if that can be changed and is not intended, else ""."""
    why, can_change = _why_idle(device)
    return why if can_change else ""


def _why_idle(device: Any) -> tuple[str, bool]:
    units = _units()
    if not _idle_and_listed(device):
        return "", False
    if device.facts["backend"] not in units.BACKENDS:
        return f"{_IDLE}: on {device.facts['backend']} they have a shape that there are no kernels for", False
    if os.environ.get(units.SWITCH) == "off":
        return f"{_IDLE} by {units.SWITCH}=off", False
    passed, reason = units.verdict(units.identity(device.facts["name"], device.facts["driver"])) or (None, "")
    if passed is False:
        return f"{_IDLE}, because their check failed: {reason}; wgrad matrix-units enable checks again", True
    if device.tensor_cores_off:
        return f"{_IDLE}: {device.tensor_cores_off}; wgrad matrix-units enable checks again", True
    library = units.installed()
    if library is None or units.gate_of(library) is None:
        return f"{_IDLE}: wgpu's library refuses them, and wgrad matrix-units status says why they stay off", False
    return f"{_IDLE}: wgrad matrix-units enable makes {_GAIN}", True


def _idle_and_listed(device: Any) -> bool:
    lacks = device.name != "wgpu" or device.matrix_units or not device.float16
    return not lacks and _units().FEATURE in device.facts.get("features", ())


def write_copy() -> str:
    """Write the copy of the library and return its path. DeviceError: the installed library's gate is not found."""
    return str(_units().write_copy())


def check(card: Card) -> Verdict:
    """Check all forms of matmul and attention on a GPU's tensor cores, in a separate process, and keep the verdict.

    DeviceError: the verdict cannot be kept.
    """
    units = _units()
    # A check that stops the machine is not tried again.
    units.keep_verdict(card.card, False, "it was begun and did not end")
    found, _ = check_in_a_process("matrix_units", str(card.index), environment={units.SWITCH: "trial"})
    units.keep_verdict(card.card, found.passed, found.reason, found.lanes)
    return found


def first_check(device: Any) -> bool:
    """Check the tensor cores of a device that lacks nothing but this check: its library offers them, and the GPU was
    not tried before.

    Returns:
        Whether they passed, so that the next device opened on the GPU uses them; False if that cannot be kept.
    """
    if not _idle_and_listed(device):
        return False
    units = _units()
    card = units.identity(device.facts["name"], device.facts["driver"])
    if os.environ.get(units.SWITCH) or units.verdict(card) is not None:
        return False
    found = next((known for known in status().cards if known.card == card), None)
    try:
        return found is not None and found.given and check(found).passed
    except DeviceError:
        return False


def disable() -> bool:
    """Remove the copy and all verdicts, and return whether there were any."""
    return bool(_units().remove())


def main(index: str) -> int:
    """Run the check in this process, and print {"passed", "reason", "keep"} as JSON."""
    return report(lambda: _device(index), trusted_cases())


def _device(index: str) -> Any:
    module = importlib.import_module("wgrad.wgsl.device")
    device = bind(module.WgpuDevice)(index)
    if not device.matrix_units:
        raise DeviceError("the library still refuses tensor cores on this GPU")
    return device
