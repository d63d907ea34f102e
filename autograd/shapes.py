"""Shapes with a -1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wgrad.device.errors import ShapeError
from wgrad.device.shown import short


def filled_in(before: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its -1, if any, filled in. ShapeError: it has not as many elements as `before`."""
    size, known = math.prod(before), math.prod(n for n in shape if n != -1)
    fits = shape.count(-1) <= 1 and all(n >= -1 for n in shape) and known > 0 and size % known == 0
    result = tuple(size // known if n == -1 else int(n) for n in shape) if fits else ()
    if not fits or math.prod(result) != size:
        raise ShapeError(
            f"reshape: shape must hold the {size} elements of {list(before)}, got {short(list(shape))}; one axis may "
            "be -1"
        )
    return result
