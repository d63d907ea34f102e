"""An operator: its name, signature, defaults, rules and messages, written once for every device.

    @operator
    def rms_norm(args, x, weight, eps, *, dtype=None):
        '''x [R, C], ... what the operator computes: this is the contract.'''
        args.array("x", x, "R C").array("weight", weight, "C", "f32")
        return {"dtype": args.dtype("dtype", dtype, x.dtype)}

    @rms_norm.reference
    def _(x, weight, eps, dtype): ...NumPy...

The rules raise ShapeError, and may return other values for some arguments (a dtype that was left out).
`device.rms_norm(...)` on a device that `bind` made runs the rules, fills in the defaults and calls the implementation
of the device's room with every argument by name.
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
_MOST_REMEMBERED = 4096


class Rules:
    """Checks of a call's arguments: a function of an Args and the call's arguments. It raises ShapeError, and
    may return arguments to be replaced."""

    def __init__(self, rules: Callable[..., Any], name: str = "") -> None:
        self.name, self.__doc__, self.__module__ = name or rules.__name__, rules.__doc__, rules.__module__
        self._rules = rules
        self._passed: dict[Any, dict[str, Any]] = {}

    def check(self, device: Any, args: tuple[Any, ...], options: dict[str, Any], name: str = "") -> dict[str, Any]:
        """Run the rules (under another name, where an operator checks for another) -> arguments to be replaced.

        They depend on shapes, dtypes and plain values alone, so what passed once is remembered: decoding asks some
        hundred times a token with the same.
        """
        key: Any = (device.float16, device.bfloat16, name, *map(_looked_at, args))
        key += tuple((option, _looked_at(value)) for option, value in options.items())
        try:
            known = self._passed.get(key)
        except TypeError:  # an argument that cannot be hashed: the rules say what it should be
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
        """The rules with a checker of the caller's -> arguments to be replaced."""
        return self._rules(checker, *args, **options) or {}


class Operator(Rules):
    """A method of every bound device. parameters: their names in order; defaults: of those that have one."""

    def __init__(self, rules: Callable[..., Any], name: str = "") -> None:
        super().__init__(rules, name)
        given = list(inspect.signature(rules).parameters.values())[1:]
        self.signature = inspect.Signature(given)
        self.parameters = tuple(p.name for p in given)
        self.defaults = {p.name: p.default for p in given if p.default is not p.empty}
        self.numpy: Callable[..., Any] | None = None

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the operator in NumPy, with the operator's parameters."""
        self.numpy = function
        return function

    def __call__(self, device: Any, *args: Any, **options: Any) -> Any:
        changed = self.check(device, args, options)
        given = {**self.defaults, **dict(zip(self.parameters, args)), **options, **changed}
        implementation = device.bound_operators.get(self.name)
        if implementation is None:  # declared, else there would be no such method
            raise OperatorMissing(device.name, self.name)
        return implementation(device, **given)

    def __get__(self, device: Any, owner: type | None = None) -> Any:
        return self if device is None else MethodType(self, device)


_PLAIN = (int, float, str, type, np.dtype, type(None))  # a union of types takes twice the time
_MOST = frozenset((int, float, str, bool, type(None)))  # of them, by their own type: sooner still


def _looked_at(value: Any) -> Any:
    """The properties of an argument that rules may use: shape and dtype of an array, the parts of a weight, a plain
    value."""
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
    """Decorator: the operator with these rules, under the function's name or another."""
    made = Operator(rules, name)
    assert made.name not in OPERATORS, f"two operators are called {made.name}"
    OPERATORS[made.name] = made
    return made
