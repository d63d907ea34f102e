"""GEMMs of experts: rows, grouped by expert, with their weights. Kernels: gemm_grouped.hip, gemm_grouped_f32.hip."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.hip.elements import implements, type_code
from wgrad.hip.formats.quantize import dequantize
from wgrad.hip.gemm import plan as gemm_plan
from wgrad.hip.gemm.gemm import HAS_ACCUMULATE, UNALIGNED, gpu_of, multiple
from wgrad.hip.gemm.linear import check_aligned
from wgrad.hip.moe.routing import take_rows
from wgrad.hip.runtime.runtime import Runtime

_HAS_RESIDUAL = 16  # gemm_grouped.hpp
_BYTES = 1 << 32  # limit on the rows that an order selects, whose offsets have 32 bits


@implements("grouped_linear")
def grouped_linear(
    device: Runtime,
    x: Array,
    weight: Array | FrozenWeight,
    start: Array,
    order: Array | None,
    alpha: float,
    add: Array | None,
    dtype: np.dtype,
) -> Array:
    n = weight.shape[0] // (start.size - 1) if isinstance(weight, FrozenWeight) else weight.shape[1]
    out = device.empty((x.shape[0] if order is None else order.size, n), dtype)
    _grouped(device, x, weight, start, order, alpha, add, out, trans_b=True)
    return out


@implements("grouped_linear_backward")
def grouped_linear_backward(
    device: Runtime, dy: Array, weight: Array | FrozenWeight, start: Array, alpha: float, dtype: np.dtype
) -> Array:
    out = device.empty((dy.shape[0], weight.shape[-1]), dtype)
    _grouped(device, dy, weight, start, None, alpha, None, out, trans_b=False)
    return out


def _grouped(
    device: Runtime,
    a: Array,
    weight: Array | FrozenWeight,
    start: Array,
    order: Array | None,
    alpha: float,
    add: Array | None,
    out: Array,
    *,
    trans_b: bool,
) -> None:
    (rows, n), k, experts = out.shape, a.shape[1], start.size - 1
    if order is not None and a.nbytes >= _BYTES:
        a, order = take_rows(device, a, order), None
    gpu, kind = gpu_of(device), type_code(a.dtype)
    if isinstance(weight, FrozenWeight) and not _decoded_inside(weight, a, kind, type_code(out.dtype), gpu.matrix16):
        weight = dequantize(device, weight, a.dtype if out.dtype != np.float32 else np.dtype(np.float32))
    layout = "nt" if trans_b else "nn"
    if isinstance(weight, FrozenWeight):
        check_aligned(weight)
        operands: list[Any] = [a, *weight.arrays().values(), *weight.parameters()]
        plan = gemm_plan.experts_frozen(gpu, kind, weight.variant, layout)
    else:
        kinds = (kind, type_code(weight.dtype))
        whole = multiple(16, a, weight)
        plan = gemm_plan.experts(gpu, kinds, layout, (n, k), type_code(out.dtype), aligned=whole)
        operands = [a, weight, *(kinds if plan.kinds else ())]
    chosen = 0 if order is None else order.size // a.shape[0]
    flags = UNALIGNED * (not multiple(16, out, add)) | _HAS_RESIDUAL * (add is not None)
    arguments = [*operands, start, order, experts, chosen, out, add, n, k, type_code(out.dtype)]
    arguments += [0 if add is None else type_code(add.dtype), flags, float(alpha)]
    tiles = rows // plan.tile.m + min(experts, rows)  # an upper bound: each expert's last tile may be partial
    grid = (-(-n // plan.tile.n), tiles, 1)
    device.launch(plan.source, plan.name, arguments, grid, threads=plan.tile.threads, work=2.0 * rows * n * k)


def _decoded_inside(w: FrozenWeight, a: Array, kind: int, out: int, matrix16: bool) -> bool:
    """Return whether the GEMM decodes the weight. It rounds to a's dtype, so only for 16-bit results."""
    whole = w.shape[1] % max(w.unit, 8) == 0 and a.shape[1] % 8 == 0 and w.shape[0] * w.shape[1] < 1 << 32
    exact = w.value_dtype in ("float32", a.dtype.name)
    return bool(matrix16 and kind and out and whole and exact) and multiple(16, a) and w.variant in gemm_plan.OF_EXPERTS


@implements("grouped_weight_grad")
def grouped_weight_grad(
    device: Runtime,
    dy: Array,
    x: Array,
    start: Array,
    order: Array | None,
    alpha: float,
    out: Array | None,
    accumulate: bool,
) -> Array:
    (rows, n), k, experts = dy.shape, x.shape[1], start.size - 1
    x = x if order is None else take_rows(device, x, order)
    out = device.empty((experts, n, k)) if out is None else out
    by4 = multiple(16, dy, x) and n % 4 == 0 and k % 4 == 0
    flags = HAS_ACCUMULATE * accumulate | UNALIGNED * (not multiple(16, out))
    arguments = [dy, x, type_code(dy.dtype), type_code(x.dtype), start, out, n, k, flags, float(alpha)]
    tile = gemm_plan.wide_tile(gpu_of(device))
    grid = (-(-k // tile.n), -(-n // tile.m), experts)
    name = f"grouped_grad_{'mix' if by4 else 'any'}"
    device.launch("gemm_grouped_f32", name, arguments, grid, threads=tile.threads, work=2.0 * rows * n * k)
    return out
