"""Operators and devices belong together: a device has each or declares to lack it, and repeats only its names."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.autograd.operators import OPERATORS, Operator
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import ShapeError
from wgrad.device.implementations import Implementations
from wgrad.hip.device import HipDevice
from wgrad.wgsl.device import WgpuDevice

CPU = ReferenceDevice()
ROOMS: dict[str, Any] = {"cpu": ReferenceDevice, "wgpu": bind(WgpuDevice), "hip": bind(HipDevice)}


@pytest.mark.parametrize("room", ROOMS)
def test_every_device_has_every_operator_or_declares_to_lack_it(room: str) -> None:
    assert set(ROOMS[room].bound_operators) | ROOMS[room].lacks == set(OPERATORS)
    assert all(isinstance(inspect.getattr_static(ROOMS[room], name), Operator) for name in OPERATORS)


@pytest.mark.parametrize("room", ROOMS)
def test_an_implementation_has_the_parameters_of_its_operator(room: str) -> None:
    """By the same names in the same order, after the device."""
    for name, function in ROOMS[room].bound_operators.items():
        names = list(inspect.signature(function).parameters)
        given = names if room == "cpu" else names[1:]
        assert tuple(given) == OPERATORS[name].parameters, name


def test_no_implementation_is_entered_for_what_is_no_operator() -> None:
    for kind in ROOMS.values():
        assert set(getattr(kind, "implementations", {})) <= set(OPERATORS)


def test_a_package_registers_an_operator_once() -> None:
    implements = Implementations()
    implements("add")(lambda device, a, b, out: a)
    with pytest.raises(ValueError, match="add already has an implementation in this package"):
        implements("add")(lambda device, a, b, out: b)


def test_binding_fills_in_defaults_and_runs_the_rules() -> None:
    implements, seen = Implementations(), dict[str, Any]()

    @implements("gemm")
    def gemm(device: Any, **arguments: Any) -> str:
        seen.update(arguments)
        return "made"

    class Room:
        implementations = implements
        description, float16, bfloat16 = "a card", True, False

    kind: Any = Room
    device = bind(kind)()
    a, b = np.ones((2, 3), np.float16), np.ones((3, 4), np.float32)
    assert device.gemm(a, b, alpha=2.0) == "made"
    assert set(seen) == set(OPERATORS["gemm"].parameters) and seen["alpha"] == 2.0 and seen["trans_a"] is False
    assert seen["dtype"] == np.float16  # a's, on every device
    with pytest.raises(ShapeError, match=r"gemm: b must be \[K, N\] with K = 3"):
        device.gemm(a, np.ones((4, 4), np.float32))
    assert not hasattr(device, "add")  # which the room lacks
    assert bind(kind) is type(device) and bind(device.__class__) is type(device)


def test_what_passed_once_is_not_what_another_call_is_judged_by() -> None:
    """The rules are remembered by shapes, dtypes and plain values."""
    logits, uniform, settings = np.ones(5, np.float32), np.full(1, 0.5, np.float32), np.ones((1, 4), np.float32)
    for _ in range(2):
        CPU.sample(logits, uniform, settings)
        with pytest.raises(ShapeError, match="settings must be"):
            CPU.sample(logits, uniform, settings[:, :3])
        with pytest.raises(ShapeError, match="uniform must be"):
            CPU.sample(np.ones((5, 1), np.float32), uniform, settings)
        with pytest.raises(ShapeError, match="uniform must be float32"):
            CPU.sample(logits, np.zeros(1, np.float16), settings)
        CPU.gemm(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))
        with pytest.raises(ShapeError, match="alpha must be finite"):
            CPU.gemm(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), alpha=float("inf"))
