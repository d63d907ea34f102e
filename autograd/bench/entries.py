"""Every entry of the bench: all operators of the contract."""

from __future__ import annotations

from wgrad.autograd.bench import memory_ops, products
from wgrad.autograd.bench.entry import Entry, Sizes
from wgrad.autograd.bench.roofline import dtypes
from wgrad.autograd.operators import OPERATORS
from wgrad.device.contract import Device


def entries(device: Device, sizes: Sizes, ops: tuple[str, ...] = ()) -> list[Entry]:
    """What is timed on the device; ops: only these operators (all of them known)."""
    kinds = dtypes(device, sizes)
    found = [e for dtype in kinds for family in (products, memory_ops) for e in family.entries(sizes, dtype)]
    assert len({e.name for e in found}) == len(found), "two entries of the bench have the same name"
    return [e for e in found if not ops or e.op in ops]


def operator_names() -> list[str]:
    return sorted(OPERATORS)
