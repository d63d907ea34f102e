"""Calls of functions on Tensors with the arguments of the self-test's operators of the same name.

An operator with cases and a function gets its gradient checked and compared with torch without further code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.selftest.calls import first_call

# Functions of Tensors that are no operator of a device: test_tensor.py checks them.
TENSOR_MODULES = {
    f"wgrad.autograd.ops.{name}"
    for name in (
        *("arithmetic", "movement", "reduction", "matmul", "einsum"),
        *("cross_entropy", "causal_attention", "torch_functions", "torch_layers"),
    )
}


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


@cache
def self_test_calls() -> dict[str, Call]:
    """Return each operator's first forward case whose arguments functional has, by name."""
    found = {}
    for name in sorted(OPERATORS.keys() & set(F.__all__)):
        made, function = first_call(name), getattr(F, name)
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
