"""Bench entries that nobody writes: of an operator whose work is bounded by its largest array, the call is that of its
self-test, made as large as the bench wants it.

That is so where its rules give no argument an axis that the largest array lacks. A product has one (K of [M, K] and
[K, N] is not in [M, N]), and so has what looks up rows of a table.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry
from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.selftest.calls import first_call
from wgrad.device.contract import Device


class _Seen(Args):
    """Arguments that pass the rules, and of which kind each array has to be."""

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.kinds: dict[str, str] = {}

    def array(self, name: str, value: Any, axes: str, kind: str = "float", hint: str = "") -> Args:
        self.kinds[name] = kind
        return super().array(name, value, axes, kind, hint)


@cache
def _look(op: str) -> tuple[dict[str, Any], tuple[int, ...], dict[str, str]] | None:
    """The self-test's call, the shape of its largest array (one or two axes), and the kinds of arrays by name."""
    optional = OPERATORS[op].defaults
    given = {n: v for n, v in first_call(op).items() if n != "dtype" or n not in optional}  # that of the arrays
    seen = _Seen(op)
    OPERATORS[op].run(seen, **given)
    arrays = [value for value in given.values() if isinstance(value, np.ndarray)]
    largest = max((array.shape for array in arrays), key=math.prod, default=())
    has_all = 1 <= len(largest) <= 2 and set(seen.size.values()) <= set(largest)
    plain = all(value is None or isinstance(value, np.ndarray | int | float) for value in given.values())
    return (given, largest, seen.kinds) if has_all and plain else None


def derived(op: str, sizes: Sizes, dtype: np.dtype, shape: tuple[int, int] | None = None) -> list[Entry]:
    """The operator's entry, with rows and columns of `sizes` or of this shape (a flat buffer has as many elements);
    none where it takes no arrays of the dtype."""
    found = _look(op)
    assert found is not None, f"{op} needs an entry of its own in autograd/bench"
    given, small, kinds = found
    if dtype != F32 and "float" not in kinds.values():
        return []
    rows, columns = shape or (sizes.rows, sizes.columns)
    large = (rows, columns) if len(small) == 2 else (rows * columns,)
    grown = dict(zip(small, large))

    def build(device: Device) -> dict[str, Any]:
        made = dict(given)
        for name, value in given.items():
            if isinstance(value, np.ndarray):
                kind = dtype if kinds[name] == "float" else value.dtype
                made[name] = device.upload(np.resize(value.astype(kind), [grown.get(n, n) for n in value.shape]))
        return made

    return [entry(op, large, dtype, build)]
