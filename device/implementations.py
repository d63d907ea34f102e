"""The table in which a device package enters its implementation of each operator, under the operator's name.

    implements = Implementations()  # or Implementations(lacks={"softmax"}) for a package without softmax

    @implements("rms_norm")
    def rms_norm(device: Runtime, x: Array, weight: Array, eps: float, dtype: np.dtype) -> tuple[Array, Array]: ...

The first parameter is the device; then follow those of the operator, with the same names in the same order, without
defaults and checks, which the operator has (autograd/ops). A device class refers to its package's table as
`implementations`; `autograd/bind.py` joins the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Implementations(dict[str, Callable[..., Any]]):
    """Functions by operator name. lacks: operators that the package declares to lack; a run that needs one of them is
    refused there, or uses another device."""

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        super().__init__()
        self.lacks = frozenset(lacks)

    def __call__(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that enters a function under an operator's name."""

        def enter(function: Function) -> Function:
            if name in self:
                raise ValueError(f"{name} already has an implementation in this package: {self[name].__module__}")
            self[name] = function
            return function

        return enter


def enter_all(package: str, above: Collection[str] = ()) -> None:
    """Import all modules of a package and its subfolders, except `runtime`, so that each enters its operators.

    above: modules of the package that import the device, and so cannot be imported by it.
    """
    for path in sorted({Path(folder) for folder in importlib.import_module(package).__path__}):
        for file in sorted([*path.glob("*.py"), *path.glob("*/*.py")]):
            parts = file.relative_to(path).with_suffix("").parts
            if parts[0] not in ("runtime", *above):
                importlib.import_module(".".join((package, *parts)))
