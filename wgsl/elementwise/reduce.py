"""Reductions: sum, sum over rows, gradient norm. Two passes of fixed order, no float atomics: the same bits each run.

Shaders: reduce.wgsl, reduce_rows.wgsl.
"""

from __future__ import annotations

from typing import NamedTuple

from wgrad.device.memory import Array
from wgrad.wgsl.elements import (
    GROUP,
    element_types,
    flat_parts,
    next_power_of_two,
    row_parts,
    same_block,
    vector_width,
)
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_MAX_PARTS = 1024  # workgroups of a first pass: enough to fill a large GPU
_MAX_CHUNKS = 256


@implements("sum")
def sum_all(device: Runtime, x: Array) -> Array:
    return _reduce_all(device, "sum_part", x, device.empty((1,)))


@implements("grad_norm")
def grad_norm(device: Runtime, g: Array) -> Array:
    return _reduce_all(device, "norm_part", g, device.empty((2,)))


def _reduce_all(device: Runtime, entry: str, x: Array, total: Array) -> Array:
    vec = vector_width(x.size)
    constants: dict[str, Constant] = {
        "VEC": vec,
        "PAIR": total.size == 2,
        "B_T": "vec4<u32>" if vec == 4 else "u32",
        **element_types(vec, X_T=x),
    }
    windows = list(flat_parts(device, [x]))
    counts = [min(-(-part.size // (vec * 1024)), _MAX_PARTS) for _, (part,) in windows]
    parts = device.empty((max(sum(counts), 1), 2))
    slot = 0
    for (_, (part,)), count in zip(windows, counts):
        params = [part.size // vec, slot, 0]
        work = float(part.nbytes)
        device.launch("reduce", [part, parts, None], params, (count, 1, 1), constants, entry=entry, work=work)
        slot += count
    # The last pass does not read x: one variant of it serves all types.
    last: dict[str, Constant] = {"VEC": 1, "PAIR": total.size == 2, "C_T": "f32", "B_T": "u32", "X_T": "f32"}
    device.launch("reduce", [None, parts, total], [0, 0, slot], (1, 1, 1), last, entry="finish")
    return total


@implements("sum_rows")
def sum_rows(device: Runtime, x: Array, out: Array | None, accumulate: bool) -> Array:
    rows, columns = x.shape
    if out is None:
        out, accumulate = device.empty((columns,)), False
    elif same_block(x, out):
        raise ValueError("sum_rows: x and out lie in one buffer; pass an out with a buffer of its own")
    for first, count, (part,) in row_parts(device, [x]):
        plan = plan_chunks(count, columns)
        add = accumulate or first > 0
        if plan.chunks == 1:
            _sum_rows(device, part, out, plan, add)
        else:
            middle = device.empty((plan.chunks, columns))
            _sum_rows(device, part, middle, plan, False)
            _sum_rows(device, middle, out, plan._replace(step=plan.chunks, chunks=1), add)
    return out


class Chunks(NamedTuple):
    """How the rows of a matrix are divided among workgroups (reduce_rows.wgsl, norm_layer.wgsl).

    vec: numbers per element. wide: elements of a row per workgroup. chunks: of `step` rows each.
    """

    vec: int
    wide: int
    step: int
    chunks: int

    def groups(self, columns: int) -> tuple[int, int, int]:
        return (-(-columns // self.vec // self.wide), self.chunks, 1)


def plan_chunks(rows: int, columns: int) -> Chunks:
    vec = vector_width(columns)
    wide = min(64, max(8, next_power_of_two(columns // vec)))
    tiles = -(-columns // vec // wide)
    chunks = max(1, min(-(-rows // (4 * GROUP // wide)), _MAX_CHUNKS, 2048 // tiles))
    step = -(-rows // chunks)
    return Chunks(vec, wide, step, -(-rows // step))


def _sum_rows(device: Runtime, x: Array, out: Array, plan: Chunks, accumulate: bool) -> None:
    rows, columns = x.shape
    constants = {"WIDE": plan.wide, "ACCUMULATE": accumulate, **element_types(plan.vec, X_T=x)}
    params = [rows, columns // plan.vec, plan.step]
    device.launch("reduce_rows", [x, out], params, plan.groups(columns), constants, work=float(x.nbytes))
