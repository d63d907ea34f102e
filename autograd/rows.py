"""Reshape arrays [..., C] to the rows [R, C] that operators over the last axis take, and back."""

from __future__ import annotations

import math
from typing import Any

from wgrad.autograd.function import Context
from wgrad.device.contract import Array
from wgrad.device.errors import ShapeError


def as_rows(ctx: Context, array: Array, name: str = "x") -> Array:
    """Return an array [..., C] as [R, C] with the same storage. ShapeError, naming the argument: it has one axis."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) == 2:  # the operator refuses what is no array
        return array
    if len(shape) < 2:
        raise ShapeError(f"{ctx.name}: {name} must have at least 2 axes, got shape {list(shape)}; reshape it")
    return ctx.device.view(array, (math.prod(shape[:-1]), int(shape[-1])))


def with_shape(ctx: Context, array: Array, shape: Any) -> Array:
    """Return the same storage in another shape."""
    return array if tuple(array.shape) == tuple(shape) else ctx.device.view(array, tuple(shape))
