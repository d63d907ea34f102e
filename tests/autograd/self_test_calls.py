"""What the self-test calls each operator with, as a call of the function on Tensors of the same name: an operator that
has cases and a function has its gradient checked, and is held to torch, without another word."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import upload_inputs
from wgrad.autograd.selftest.cases import cases


class Call(NamedTuple):
    """tensors: shapes of the arguments that may have a gradient, by name; constants: the other ones."""

    function: Callable[..., Any]
    tensors: dict[str, tuple[int, ...]]
    constants: dict[str, Any]

    def on(self, put: Callable[[np.ndarray], Any], dtype: Any) -> Callable[..., Any]:
        """The function of the Tensors alone, in their order. put: an array of the host to where they are."""

        def constant(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            return put(value.astype(dtype) if value.dtype.kind == "f" else value)

        constants = {name: constant(value) for name, value in self.constants.items()}
        return lambda *tensors: self.function(**dict(zip(self.tensors, tensors)), **constants)


class _Recorder(ReferenceDevice):
    """Keeps the arguments of the first call of each operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, dict[str, Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATORS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.made.setdefault(name, OPERATORS[name].signature.bind(*args, **options).arguments)
            return found(*args, **options)

        return call


@cache
def self_test_calls() -> dict[str, Call]:
    """By the operator's name: its first forward case, where functional has all of its arguments."""
    device = _Recorder()
    for case in cases(float16=False):
        if case.op in F.__all__ and case.op not in device.made:
            case.call(device, upload_inputs(device, case.inputs()))
    found = {}
    for name in sorted(device.made.keys() & set(F.__all__)):
        made, function = device.made[name], getattr(F, name)
        takes = inspect.signature(function).parameters
        given = {n: value for n, value in made.items() if n != "dtype"}  # gradients are checked in float64
        wanted = {n for n, p in takes.items() if p.default is p.empty}
        if wanted <= given.keys() <= takes.keys():
            tensors = {
                n: value.shape
                for n, value in given.items()
                if isinstance(value, np.ndarray)
                and ("Tensor" in takes[n].annotation or "Weight" in takes[n].annotation)
            }
            found[name] = Call(function, tensors, {n: v for n, v in given.items() if n not in tensors})
    return found
