"""Cases recorded from real work by a reference device, which keeps operator calls with their inputs as cases.

Operators in a training step get shapes, dtypes and combinations of options that no list of cases foresees. A call is
kept if it is the first with its shapes, dtypes and options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case, Inputs, Outputs, dtype_name, map_arrays
from wgrad.autograd.selftest.quantize import quantized
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import FrozenWeight

# Arguments that operators change, which are outputs in addition to the results.
_CHANGED = {
    "kv_append": ("cache",),
    "rope_append": ("keys", "values"),
    "paged_append": ("keys", "values"),
    "advance": ("tokens", "step", "ids", "positions", "cache_len", "uniform"),
    "clip": ("state", "loss_scale"),
    "adamw": ("p", "exp_avg", "exp_avg_sq"),
}
_FINISH = {"clip": "elements", "grad_norm": "elements"}


class RecordingDevice(ReferenceDevice):
    """A reference device that adds new kinds of operator calls to `cases`. label: prefix of their names."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self._seen: set[Any] = set()
        self._inside = False
        self.cases: list[Case] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATORS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # called by another operator
                return found(*args, **kwargs)
            self._note(name, args, kwargs)
            self._inside = True
            try:
                return found(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def _note(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = OPERATORS[op].signature.bind(*args, **kwargs).arguments
        arrays, options = _flatten(given)
        key = (op, *((n, _signature(a)) for n, a in arrays.items()), repr(sorted(options.items())), *_aliases(arrays))
        if key in self._seen:
            return
        self._seen.add(key)
        self.cases.append(_case(f"{self._label}/{len(self.cases)} {op}", op, given, arrays))


def _flatten(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into arrays by name (parts of a tuple as name.0, name.1), and all others."""
    arrays, options = {}, {}
    for name, value in given.items():
        if isinstance(value, np.ndarray | FrozenWeight):
            arrays[name] = value
        elif isinstance(value, tuple) and any(isinstance(part, np.ndarray) for part in value):
            arrays |= {f"{name}.{i}": part for i, part in enumerate(value)}
        else:
            options[name] = value
    return arrays, options


def _signature(value: Any) -> Any:
    if isinstance(value, FrozenWeight):
        return (value.shape, *value.constants().items(), *value.parameters())
    return (value.shape, value.dtype.name)


def _aliases(arrays: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, first name of the same array) for arguments that are one array."""
    first: dict[Any, str] = {}
    found = []
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            key = (value.__array_interface__["data"][0], value.shape, value.dtype.name)
            found.append((name, first.setdefault(key, name)))
    return [(name, same) for name, same in found if name != same]


def _case(name: str, op: str, given: dict[str, Any], arrays: dict[str, Any]) -> Case:
    same = dict(_aliases(arrays))
    kept: Inputs = {n: map_arrays(a, np.copy) for n, a in arrays.items() if n not in same}
    if "out" in kept and not given.get("accumulate"):
        kept["out"] = map_arrays(kept["out"], np.zeros_like)  # its contents are not read

    def pick(x: Inputs, argument: str, value: Any) -> Any:
        if isinstance(value, np.ndarray | FrozenWeight):
            return x[same.get(argument, argument)]
        if isinstance(value, tuple) and f"{argument}.0" in arrays:
            return tuple(x[same.get(n, n)] for n in (f"{argument}.{i}" for i in range(len(value))))
        return value

    def call(device: Device, x: Inputs) -> Outputs:
        if op == "quantize":
            return quantized(device, x["w"], given.get("block_size", 64), double)
        made = getattr(device, op)(**{n: pick(x, n, value) for n, value in given.items()})
        made = tuple(made.arrays().values()) if isinstance(made, FrozenWeight) else made
        results = made if isinstance(made, tuple) else (made,)
        outputs = {f"result {i}": array for i, array in enumerate(results) if array is not None}
        return {**outputs, **{n: x[same.get(n, n)] for n in _CHANGED.get(op, ())}}

    def build(rng: np.random.Generator) -> Inputs:
        return {n: map_arrays(a, np.copy) for n, a in kept.items()}

    double = given.get("double", False)
    finish = {**_FINISH, "quantize": "nf4 double" if double else "nf4"}.get(op, "")
    first = next((a for a in arrays.values() if isinstance(a, np.ndarray)), None)
    dtype = dtype_name(first.dtype) if first is not None else ""
    shape = "x".join(map(str, first.shape)) if first is not None else ""
    direction = "backward" if op.endswith("_backward") or op == "linear_cross_entropy" else "forward"
    return Case(name, op, direction, dtype, shape, build, call, BUILTIN_ULPS, finish)


def recorded(label: str, work: Callable[[RecordingDevice], None]) -> list[Case]:
    """Return the cases that a function records."""
    device = RecordingDevice(label)
    work(device)
    return device.cases
