"""Combine a device class with the operators, for `select_device`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import OPERATORS
from wgrad.device.contract import Array
from wgrad.device.implementations import enter_all

enter_all("wgrad.autograd.ops")

_Base: Any = object  # in place of the device class that `super()` finds


class Bound(_Base):  # type: ignore[misc]
    """Base class in front of a device class: checks arguments about storage, and binds dry runs too."""

    bound_operators: dict[str, Callable[..., Any]]
    lacks: frozenset[str]

    def write(self, array: Array, host: np.ndarray) -> None:
        shape, dtype = getattr(host, "shape", None), getattr(host, "dtype", None)
        if shape is None or tuple(shape) != tuple(array.shape) or dtype != array.dtype:
            raise Args("write").fail(
                f"host must be a NumPy array like the one on the device, {array.dtype} {list(array.shape)}, got "
                f"{type(host).__name__ if shape is None else f'{dtype} {list(shape)}'}; reshape or cast it"
            )
        super().write(array, host)

    def copy(self, src: Array, out: Array) -> None:
        _check_alike("copy", src, out)
        super().copy(src, out)

    def transfer(self, src: Array, out: Array) -> None:
        _check_alike("transfer", src, out)
        super().transfer(src, out)

    def dry_run(self) -> Any:
        dry = super().dry_run()
        if dry is not None:
            kind: Any = type(dry)
            dry.__class__ = bind(kind)
        return dry


def _check_alike(op: str, src: Array, out: Array) -> None:
    if src.size != out.size or src.dtype != out.dtype:  # the text takes longer than a launch
        of_src, of_out = (f"{array.dtype} {list(array.shape)}" for array in (src, out))
        raise Args(op).fail(f"out must have the size and dtype of src, {of_src}, got {of_out}")


@cache
def bind(kind: Any) -> Any:
    """Return the device class `kind` with every operator as a method, under the same name.

    Implementations come from the table `kind.implementations`. Operators that the table declares as lacking become
    methods that raise OperatorMissing.
    """
    if issubclass(kind, Bound):
        return kind
    implemented = {name: kind.implementations[name] for name in OPERATORS if name in kind.implementations}
    lacks = frozenset(getattr(kind.implementations, "lacks", ()))
    if wrong := sorted(lacks - OPERATORS.keys() | lacks & implemented.keys()):
        raise ValueError(f"{kind.__name__} says that it lacks {wrong[0]}, which is no operator, or which it has")
    methods = {name: OPERATORS[name] for name in implemented.keys() | lacks}
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Bound, kind), {**about, **methods, "bound_operators": implemented, "lacks": lacks})
