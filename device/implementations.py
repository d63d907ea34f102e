"""The table in which a device room enters its implementation of each operator, under the operator's name.

    implements = Implementations()  # or Implementations(lacks={"softmax"}), where this room has no softmax yet

    @implements("rms_norm")
    def rms_norm(device: Runtime, x: Array, weight: Array, eps: float, dtype: np.dtype) -> tuple[Array, Array]: ...

The device comes first; then the operator's own parameters, by the same names in the same order, without defaults and
without checks: what an argument may be, and what it is when left out, stands once, at the operator
(autograd/ops). A device class names its room's table as `implementations`; `autograd/bind.py` joins the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Implementations(dict[str, Callable[..., Any]]):
    """Operator's name -> function. lacks: operators that the room declares not to have; a run that needs one of them is
    refused there, or goes to another device."""

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        super().__init__()
        self.lacks = frozenset(lacks)

    def __call__(self, name: str) -> Callable[[Function], Function]:
        """A decorator that enters a function under an operator's name."""

        def enter(function: Function) -> Function:
            if name in self:
                raise ValueError(f"{name} has an implementation in this package already: {self[name].__module__}")
            self[name] = function
            return function

        return enter


def enter_all(package: str) -> None:
    """Import every file in the package's folder and in the folders of its families, so that each enters its operators.

    `runtime` holds none.
    """
    for path in sorted({Path(folder) for folder in importlib.import_module(package).__path__}):
        for file in sorted([*path.glob("*.py"), *path.glob("*/*.py")]):
            parts = file.relative_to(path).with_suffix("").parts
            if parts[0] != "runtime":
                importlib.import_module(".".join((package, *parts)))
