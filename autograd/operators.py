"""Operators: name, signature, defaults, rules and error messages, written once for all devices.

    @operator
    def rms_norm(args, x, weight, eps, *, dtype=None):
        '''What the operator computes, with shapes and dtypes: this is the contract.'''
        args.array("x", x, "R C").array("weight", weight, "C", "f32")
        return {"dtype": args.dtype("dtype", dtype, x.dtype)}

    @rms_norm.reference
    def _(x, weight, eps, dtype): ...NumPy...

The rules raise ShapeError, and may return replacements for arguments, such as a dtype that was left out. On a device of
`bind`, `device.rms_norm(...)` runs the rules, fills in defaults, and calls the device's implementation with all
arguments by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.device.errors import OperatorMissing
from wgrad.device.memory import Array

OPERATORS: dict[str, Operator] = {}
_MOST_REMEMBERED = 4096  # calls whose check is remembered


class Rules:
    """Rules for the arguments of a call: a function of an Args and the arguments.

    It raises ShapeError, and may return arguments to replace.
    """

    def __init__(self, rules: Callable[..., Any], name: str = "") -> None:
        self.name, self.__doc__, self.__module__ = name or rules.__name__, rules.__doc__, rules.__module__
        self._rules = rules
        self._passed: dict[Any, dict[str, Any]] = {}

    def check(self, device: Any, args: tuple[Any, ...], options: dict[str, Any], name: str = "") -> dict[str, Any]:
        """Run the rules and return the arguments to replace.

        Rules depend only on shapes, dtypes and plain values, so passed checks are remembered: generating a token
        repeats some hundred of them.

        name: for errors, if an operator checks for another one.
        """
        key: Any = (device.float16, device.bfloat16, name, *map(_looked_at, args))
        key += tuple((option, _looked_at(value)) for option, value in options.items())
        try:
            known = self._passed.get(key)
        except TypeError:  # an argument cannot be hashed: the rules will refuse it
            known = key = None
        if known is not None:
            return known
        changed = self.run(Args(name or self.name, device), *args, **options)
        if key is not None:
            if len(self._passed) >= _MOST_REMEMBERED:
                self._passed.clear()
            self._passed[key] = changed
        return changed

    def run(self, checker: Args, *args: Any, **options: Any) -> dict[str, Any]:
        """Run the rules with a checker of the caller, and return the arguments to replace."""
        return self._rules(checker, *args, **options) or {}


class Operator(Rules):
    """A method of all bound devices. parameters: names, in order. defaults: values of the parameters that have one."""

    def __init__(self, rules: Callable[..., Any], name: str = "") -> None:
        super().__init__(rules, name)
        given = list(inspect.signature(rules).parameters.values())[1:]
        self.signature = inspect.Signature(given)
        self.parameters = tuple(p.name for p in given)
        self.defaults = {p.name: p.default for p in given if p.default is not p.empty}
        self.numpy: Callable[..., Any] | None = None

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the operator's implementation in NumPy, which has the same parameters."""
        self.numpy = function
        return function

    def __call__(self, device: Any, *args: Any, **options: Any) -> Any:
        changed = self.check(device, args, options)
        given = {**self.defaults, **dict(zip(self.parameters, args)), **options, **changed}
        implementation = device.bound_operators.get(self.name)
        if implementation is None:  # the device declares that it lacks the operator
            raise OperatorMissing(device.name, self.name)
        return implementation(device, **given)

    def __get__(self, device: Any, owner: type | None = None) -> Any:
        return self if device is None else MethodType(self, device)


_PLAIN = (int, float, str, type, np.dtype, type(None))  # a tuple, because a union of types takes twice the time
_MOST = frozenset((int, float, str, bool, type(None)))  # the most frequent types, looked up even faster


def _looked_at(value: Any) -> Any:
    """Return the properties of an argument that rules may use: shape and dtype of arrays, parts of weights, values."""
    kind = type(value)
    if kind in _MOST:
        return value
    if kind is Array:
        return (value.shape, value.dtype) if value.shape else value
    if isinstance(value, tuple):
        return tuple(_looked_at(part) for part in value)
    if isinstance(value, _PLAIN):
        return value
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return (type(value), *(_looked_at(getattr(value, name)) for name in fields))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return (tuple(shape), dtype) if shape and dtype is not None else value


def operator(rules: Callable[..., Any], name: str = "") -> Operator:
    """Decorate rules to make them an operator, with the function's name or another one."""
    made = Operator(rules, name)
    assert made.name not in OPERATORS, f"two operators are called {made.name}"
    OPERATORS[made.name] = made
    return made
