"""All entries of the bench: every operator of the contract."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.bench import delta_rule, experts, memory_ops, products
from wgrad.autograd.bench.derived import derived
from wgrad.autograd.bench.entry import F32, Entry, Sizes
from wgrad.autograd.bench.roofline import dtypes
from wgrad.autograd.operators import OPERATORS
from wgrad.device.contract import Device


def entries(device: Device, sizes: Sizes, ops: tuple[str, ...] = ()) -> list[Entry]:
    """Return the benchmarks that a device can run. ops: only these operators, if there are any."""
    found = [e for dtype in dtypes(device, sizes) for e in entries_of(sizes, dtype)]
    assert len({e.name for e in found}) == len(found), "two entries of the bench have the same name"
    return [e for e in found if not ops or e.op in ops]


def entries_of(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    """Return the written entries, and a derived one for every other operator."""
    others = [op for op in OPERATORS if op not in {e.op for e in _written(sizes, F32)}]
    return _written(sizes, dtype) + [e for op in others for e in derived(op, sizes, dtype)]


def _written(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    return [e for part in (products, memory_ops, delta_rule, experts) for e in part.entries(sizes, dtype)]


def operator_names() -> list[str]:
    return sorted(OPERATORS)
