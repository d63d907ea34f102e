"""Gradients in other forms than an array, for neighboring nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wgrad.device.contract import Array


class GradientWithCopy(NamedTuple):
    """A gradient with a rounded copy, which saves the receiving node from rounding it."""

    whole: Array
    rounded: Array


def whole_of(grad: Array | GradientWithCopy | None) -> Array | None:
    """Return a gradient as an array."""
    return grad.whole if isinstance(grad, GradientWithCopy) else grad


class Recomputed:
    """An activation that its producer's backward recomputes, so that consumers need not save it.

    The consumers' backwards, which run before, register functions that get the activation.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[Array], None]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def then(self, use: Callable[[Array], None]) -> None:
        """Register a function to call with the activation."""
        self._waiting.append(use)

    def give(self, output: Array) -> None:
        """Call the registered functions with the activation."""
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            use(output)
