"""`wgrad.compile`: record a step of work on Tensors at its second call, and replay it from then on."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from wgrad.autograd.creation import device_named
from wgrad.autograd.host_arrays import as_dtype, to_device
from wgrad.autograd.modes import recording_step
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import Tensor, before_writing
from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError


class CompiledStep:
    """A function whose device work is recorded, once for each combination of shapes and plain arguments."""

    def __init__(self, function: Callable[..., Any], device: str | Device | None = None) -> None:
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", "step")
        self._function, self._device = function, device
        self._steps: dict[Any, _Step] = {}

    def __call__(self, *args: Any) -> Any:
        given = [a if isinstance(a, Tensor) else np.asarray(a) if isinstance(a, np.ndarray | list) else a for a in args]
        for number, a in enumerate(given):
            if isinstance(a, Tensor) and a.requires_grad:
                raise WgradError(
                    f"compile: argument {number} of {self._name} requires a gradient, which a copy of it would get; "
                    "use it in the step without passing it"
                )
            if not isinstance(a, Tensor | np.ndarray | Hashable):
                raise WgradError(
                    f"compile: argument {number} of {self._name} must be a Tensor, an array or a plain value, "
                    f"got {type(a).__name__}"
                )
        key = tuple((a.shape, np.dtype(a.dtype)) if isinstance(a, Tensor | np.ndarray) else _plain(a) for a in given)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self._function, self._where(given), given)
        return step(given)

    @property
    def launches(self) -> int:
        """Kernel launches of all recordings."""
        return sum(step.recorded.dispatches for step in self._steps.values())

    def _where(self, args: list[Any]) -> Device:
        found = next((a.device for a in args if isinstance(a, Tensor)), None)
        return found or device_named(self._device)


def _plain(value: Any) -> Any:
    """Return a key for a plain value. Python considers True, 1 and 1.0 equal, and also 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


class _Step:
    """One recording, with its own arrays for arguments and results."""

    def __init__(self, function: Callable[..., Any], device: Device, args: list[Any]) -> None:
        self._function, self._device = function, device
        self.recorded = Recorded(device)
        self._inputs = [self._input(a) for a in args]
        self._outputs: list[Array] = []
        self._given_out: list[weakref.ref[Tensor]] = []
        self._shape: Any = None  # result of the function, with numbers of outputs in place of Tensors

    def _input(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Tensor(self._device.empty(value.shape, value.dtype), self._device)
        if isinstance(value, np.ndarray):
            return Tensor(to_device("compile", value, self._device), self._device)
        return value

    def __call__(self, args: list[Any]) -> Any:
        self._keep_what_was_given_out()
        before_writing()
        for kept, value in zip(self._inputs, args):
            if isinstance(value, Tensor):
                self._device.copy(value.data, kept.data)
            elif isinstance(value, np.ndarray):
                self._device.write(kept.data, as_dtype("compile", value, kept.dtype))
        self.recorded(self._run)
        made = [Tensor(array, self._device) for array in self._outputs]
        self._given_out = [weakref.ref(x) for x in made]
        return _filled(self._shape, made)

    def _keep_what_was_given_out(self) -> None:
        """Copy results of the last call that are still in use, because the next call overwrites their memory."""
        for reference in self._given_out:
            tensor = reference()
            if tensor is not None:
                copied = self._device.empty(tensor.shape, tensor.dtype)
                self._device.copy(tensor.data, copied)
                tensor.data = copied

    def _run(self) -> None:
        name = getattr(self._function, "__name__", "step")
        with recording_step(name, self.recorded.is_rehearsal):
            found: list[Tensor] = []
            self._shape = _numbered(self._function(*self._inputs), found, name)
            if not self._outputs:
                self._outputs = [self._device.empty(x.shape, x.dtype) for x in found]
            for x, out in zip(found, self._outputs, strict=True):
                self._device.copy(x.data, out)
            del found
            before_writing()


def _numbered(value: Any, found: list[Tensor], name: str) -> Any:
    if isinstance(value, Tensor):
        found.append(value)
        return _Number(len(found) - 1)
    if isinstance(value, tuple | list):
        return type(value)(_numbered(part, found, name) for part in value)
    if isinstance(value, dict):
        return {key: _numbered(part, found, name) for key, part in value.items()}
    if value is None:
        return None
    raise WgradError(
        f"compile: {name} may return Tensors, alone or in tuples, lists and dicts, got {type(value).__name__}"
    )


class _Number(int):
    """The number of an output."""


def _filled(value: Any, made: list[Tensor]) -> Any:
    if isinstance(value, _Number):
        return made[value]
    if isinstance(value, tuple | list):
        return type(value)(_filled(part, made) for part in value)
    if isinstance(value, dict):
        return {key: _filled(part, made) for key, part in value.items()}
    return value


def compile(function: Callable[..., Any], *, device: str | Device | None = None) -> CompiledStep:
    """Compile a step: its first call runs normally, its second call is recorded, and later calls replay that.

    Arguments are Tensors, NumPy arrays and plain values; each combination of shapes and plain values has its own
    recording. Results are Tensors. A replay repeats the device's work, not the step's Python code. So the step may not
    read values (`item`, `numpy`), and only its results and parameters keep what it computes.

    Args:
        function: The step, for example forward, backward and the optimizer's step.
        device: Device for NumPy arrays if no argument is a Tensor; None: the default.

    Returns:
        The step, to be called like the function. `launches` counts the kernel launches of its recordings.

    Raises:
        WgradError: In a call, an argument requires a gradient or has another type, the function returns anything but
            Tensors (alone, or in tuples, lists and dicts), or it reads values.
        DeviceUnavailable: In a call, the device's name is unknown, or it cannot be used here.
    """
    return CompiledStep(function, device)
