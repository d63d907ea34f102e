"""Measuring a device's roofs, and each operator's share of them.

Source: Williams, Waterman, Patterson, Roofline (2009).

The memory roof is the better of a copy and an addition of arrays larger than any cache. Arithmetic roofs are measured
with the device's own kernels (`Device.roofs`); if it has none, with its largest product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.bench.cost import PRODUCTS, Cost, cost, product_flop
from wgrad.autograd.bench.entry import F32, Entry, Sizes, normal
from wgrad.autograd.bench.timing import WARM_SECONDS, Time, time_device
from wgrad.device.contract import Device
from wgrad.device.roof import TENSOR_CORES

MEMORY = "memory"
GOOD_SHARE = 0.8  # share of a roof above which a kernel is not worth improving
LAUNCH_BOUND = 3.0  # work that takes less than the time of so many launches is mostly launch


@dataclass(frozen=True)
class MeasuredRoof:
    """A measured roof. per_second: bytes for MEMORY, FLOP for the others. by: description of the work."""

    name: str
    per_second: float
    spread: float
    by: str


@dataclass(frozen=True)
class Row:
    """Measurement of an operator.

    bound: "memory" or "arithmetic". roof: name of the limiting roof. share: share of the rate that this roof allows at
    the operator's intensity (FLOP / byte).
    """

    name: str
    op: str
    dtype: str
    shape: str
    seconds: float
    spread: float
    flop: float
    nbytes: float
    intensity: float
    bound: str
    roof: str
    share: float
    look_at: str


@dataclass(frozen=True)
class Machine:
    """Roofs by name, and the seconds of a launch with next to no work."""

    roofs: dict[str, MeasuredRoof]
    launch_seconds: float


def measure_machine(device: Device, sizes: Sizes, warm_up: float = WARM_SECONDS) -> Machine:
    """Measure every roof of the device, and the time of a launch."""
    found = [_memory(device, sizes, warm_up)]
    for roof in device.roofs():
        time = time_device(device, roof.run, warm_up)
        found.append(MeasuredRoof(roof.name, roof.flop / time.seconds, time.spread, "multiply-adds in registers"))
    if len(found) == 1:
        found += [_product(device, sizes.sides[-1], dtype, warm_up) for dtype in dtypes(device, sizes)]
    small = device.zeros((64,))
    launch = time_device(device, lambda: device.fill(small, 1.0), 0.0)
    return Machine({roof.name: roof for roof in found}, launch.seconds)


def dtypes(device: Device, sizes: Sizes) -> list[np.dtype]:
    """Return the activation dtypes: float32, and on a GPU its fastest 16-bit dtype, or float16 if it has that."""
    if device.name == "cpu" or (sizes.name != "large" and device.fastest_compute == "float32"):
        return [F32]
    if device.fastest_compute == "bfloat16":
        import ml_dtypes

        return [F32, np.dtype(ml_dtypes.bfloat16)]
    return [F32, np.dtype(np.float16)] if device.float16 else [F32]


def _memory(device: Device, sizes: Sizes, warm_up: float) -> MeasuredRoof:
    count = sizes.memory_bytes // 4
    a, b, out = (device.zeros((count,)) for _ in range(3))
    works: list[tuple[str, int, Callable[[], Any]]] = [
        ("a copy", 2, lambda: device.copy(a, out)),
        ("an addition", 3, lambda: device.add(a, b, out=out)),
    ]
    best = None
    for by, arrays, work in works:
        time = time_device(device, work, warm_up)
        roof = MeasuredRoof(MEMORY, 4.0 * arrays * count / time.seconds, time.spread, by)
        best = roof if best is None or roof.per_second > best.per_second else best
    assert best is not None
    return best


def _product(device: Device, side: int, dtype: np.dtype, warm_up: float) -> MeasuredRoof:
    """Measure the fastest of the three transpositions that a step uses."""
    a, b = (normal(device, (side, side), dtype, seed) for seed in (0, 1))
    ways: list[dict[str, bool]] = [{}, {"trans_b": True}, {"trans_a": True}]
    times = [time_device(device, partial(device.gemm, a, b, **way), warm_up) for way in ways]
    best = min(times, key=lambda time: time.seconds)
    name = dtype.name if dtype == F32 else TENSOR_CORES
    return MeasuredRoof(name, product_flop(side, side, side) / best.seconds, best.spread, f"a matmul of {side}³")


def measure(device: Device, machine: Machine, entry: Entry, warm_up: float = WARM_SECONDS) -> Row:
    """Time an operator and compare it with its roof."""
    given = entry.build(device)
    call = getattr(device, entry.op)
    spent = cost(entry.op, given, call(**given))
    return place(device, machine, entry, spent, time_device(device, lambda: call(**given), warm_up))


def place(device: Device, machine: Machine, entry: Entry, spent: Cost, time: Time) -> Row:
    """Return the limiting roof, the fraction of it that was reached, and a hint."""
    on_units = entry.op in PRODUCTS and entry.dtype == device.fastest_compute and TENSOR_CORES in machine.roofs
    arithmetic = machine.roofs[TENSOR_CORES if on_units else "float32"]
    memory = machine.roofs[MEMORY]
    by_memory, by_arithmetic = spent.nbytes / memory.per_second, spent.flop / arithmetic.per_second
    bound = "memory" if by_memory >= by_arithmetic else "arithmetic"
    share = max(by_memory, by_arithmetic) / time.seconds
    return Row(
        entry.name, entry.op, entry.dtype, entry.shape, time.seconds, time.spread, spent.flop, spent.nbytes,
        spent.intensity, bound, MEMORY if bound == "memory" else arithmetic.name, share,
        _look_at(entry.op, bound, share, time.seconds / machine.launch_seconds, on_units),
    )  # fmt: skip


def _look_at(op: str, bound: str, share: float, launches: float, on_units: bool) -> str:
    if launches < LAUNCH_BOUND and share < GOOD_SHARE:
        return f"the launch: the work is {launches:.1f} of one; fuse it with a neighbor"
    if bound == "memory":
        if share >= GOOD_SHARE:
            return "nothing here: fewer bytes only, by fusing or by 16 bits"
        return "the width of loads, rows a workgroup, passes over the data"
    if share >= GOOD_SHARE:
        return "nothing here: fewer operations only" + ("" if on_units or op not in PRODUCTS else ", or tensor cores")
    if op in PRODUCTS:
        return "tiles and splits (bench_gemm.py, bench_attention.py --sweep), idle workgroups"
    return "the operations of an element, and how many workgroups run"


def choose_sizes(device: Device) -> str:
    """Return the name of the sizes that a device measures in a minute or two, by its speed of copies."""
    for name, nbytes, most in (("tiny", 64 << 10, 0.005), ("small", 16 << 20, 2 * (16 << 20) / 30e9)):
        a, b = (device.zeros((nbytes // 4,)) for _ in range(2))
        if time_device(device, partial(device.copy, a, b), 0.0).seconds > most:
            return name
    return "large"
