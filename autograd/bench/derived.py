"""Bench entries that are derived from self-tests: the self-test's call, enlarged to the bench's sizes.

That works for operators whose largest array has every axis of the other arguments. A product is none of these (K of
[M, K] and [K, N] is not in [M, N]), nor is a lookup of a table's rows.
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
    """Arguments whose checks also record which kind each array must be."""

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.kinds: dict[str, str] = {}

    def array(self, name: str, value: Any, axes: str, kind: str = "float", hint: str = "") -> Args:
        self.kinds[name] = kind
        return super().array(name, value, axes, kind, hint)


@cache
def _look(op: str) -> tuple[dict[str, Any], tuple[int, ...], dict[str, str]] | None:
    """Return the self-test's call, the shape of its largest array (one or two axes), and the kinds of arrays by name.

    None: the operator's entry cannot be derived.
    """
    optional = OPERATORS[op].defaults
    given = {n: v for n, v in first_call(op).items() if n != "dtype" or n not in optional}  # default: the arrays' dtype
    seen = _Seen(op)
    OPERATORS[op].run(seen, **given)
    arrays = [value for value in given.values() if isinstance(value, np.ndarray)]
    largest = max((array.shape for array in arrays), key=math.prod, default=())
    has_all = 1 <= len(largest) <= 2 and set(seen.size.values()) <= set(largest)
    plain = all(value is None or isinstance(value, np.ndarray | int | float) for value in given.values())
    return (given, largest, seen.kinds) if has_all and plain else None


def derived(op: str, sizes: Sizes, dtype: np.dtype, shape: tuple[int, int] | None = None) -> list[Entry]:
    """Return the operator's entry, or none if it takes no arrays of the dtype.

    Args:
        op: Name of the operator.
        sizes: Sizes of the bench.
        dtype: Dtype of its floating-point arrays.
        shape: Rows and columns, if not those of `sizes`; a flat array has as many elements.
    """
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
