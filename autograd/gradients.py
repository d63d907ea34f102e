"""Gradients in other forms than an array, as the backwards of neighbouring nodes pass them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wgrad.device.contract import Array


class GradientWithCopy(NamedTuple):
    """A gradient, and the same as the node that it goes to would round it, from the operator that made it."""

    whole: Array
    rounded: Array


def whole_of(grad: Array | GradientWithCopy | None) -> Array | None:
    return grad.whole if isinstance(grad, GradientWithCopy) else grad


class Recomputed:
    """An activation that its backward recomputes, so that consumers need not save it: what they will do with it, noted
    by their backwards, which all run before."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[Array], None]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def then(self, use: Callable[[Array], None]) -> None:
        self._waiting.append(use)

    def give(self, output: Array) -> None:
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            use(output)
