"""GEMMs of dense arrays. plan.py chooses the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import implements, type_code
from wgrad.hip.gemm import plan as gemm_plan
from wgrad.hip.gemm.plan import Gpu, Plan
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime

HAS_ACCUMULATE, _V_ALONG_RANK, UNALIGNED, _SWAPPED = 1, 2, 4, 8  # gemm_epilogue.hpp
LowRank = tuple[Array, Array]


@dataclass(frozen=True)
class Epilogue:
    """Epilogue of a GEMM: alpha * product + u op(v) + bias + residual (+ out where accumulated)."""

    alpha: float = 1.0
    bias: Array | None = None
    residual: Array | None = None
    lowrank: LowRank | None = None
    accumulate: bool = False


@implements("gemm")
def gemm(
    device: Runtime,
    a: Array,
    b: Array,
    trans_a: bool,
    trans_b: bool,
    alpha: float,
    bias: Array | None,
    residual: Array | None,
    lowrank: LowRank | None,
    out: Array | None,
    accumulate: bool,
    dtype: np.dtype,
) -> Array:
    epilogue = Epilogue(alpha, bias, residual, lowrank, accumulate)
    return dense_product(device, a, b, out, dtype, epilogue, trans_a=trans_a, trans_b=trans_b)


def dense_product(
    device: Runtime,
    a: Array,
    b: Array,
    out: Array | None,
    dtype: Any,
    epilogue: Epilogue,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Array:
    batch = a.shape[0] if a.ndim == 3 else 1
    m, k = (a.shape[-1], a.shape[-2]) if trans_a else (a.shape[-2], a.shape[-1])
    n = b.shape[-2] if trans_b else b.shape[-1]
    out = device.empty((batch, m, n) if a.ndim == 3 else (m, n), dtype) if out is None else out
    layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
    kinds = (type_code(a.dtype), type_code(b.dtype))
    plan = gemm_plan.dense(gpu_of(device), kinds, layout, (m, n, k), batch, multiple(16, a, b), type_code(out.dtype))
    operands: list[Any] = [a, b, *(kinds if plan.kinds else ())]
    if plan.swapped:
        operands = [b, a, *reversed(kinds)]
    strides = [] if plan.source in ("gemv", "gemm_skinny") else [Long(m * k), Long(k * n)]
    launch_product(device, plan, operands, strides, out, (m, n, k), batch, trans_b, epilogue)
    return out


def gpu_of(device: Runtime) -> Gpu:
    """Return the GPU that plans are made for, looked up once per device; `planned_for` replaces its compute units."""
    gpu = device.once(_gpu)
    return gpu if gpu.compute_units == device.compute_units else replace(gpu, compute_units=device.compute_units)


def _gpu(device: Runtime) -> Gpu:
    has, flushes = device.modules.has, device.architecture == "gfx90a"
    return Gpu(device.wave, device.compute_units, has("gemm"), has("gemm_split"), flushes_denormals=flushes)


def launch_product(
    device: Runtime,
    plan: Plan,
    operands: list[Any],
    strides: list[Any],
    out: Array,
    mnk: tuple[int, int, int],
    batch: int,
    trans_b: bool,
    epilogue: Epilogue,
) -> None:
    """Launch a plan's kernel. operands, strides: the kernel's first and last arguments."""
    m, n, k = mnk
    u, v = epilogue.lowrank or (None, None)
    kinds = [0 if x is None else type_code(x.dtype) for x in (out, epilogue.residual, u, v)]
    unaligned = not multiple(16, out, epilogue.bias, epilogue.residual)
    flags = HAS_ACCUMULATE * epilogue.accumulate | UNALIGNED * unaligned
    target, bias, residual, now, kind = out, epilogue.bias, epilogue.residual, flags, kinds[0]
    if plan.splits > 1:
        target, bias, residual, now, kind = device.empty((plan.splits, m, n)), None, None, 0, 0
    now |= _V_ALONG_RANK * trans_b | _SWAPPED * plan.swapped
    arguments = [*operands, target, bias, residual, u, v, m, n, k, plan.per_split, 0 if u is None else u.shape[1]]
    arguments += [kind, *kinds[1:], now, float(epilogue.alpha), *strides]
    grid = (-(-n // plan.tile.n), -(-m // plan.tile.m), batch * plan.splits)
    work = 2.0 * batch * m * n * k
    device.launch(plan.source, plan.name, arguments, grid, threads=plan.tile.threads, work=work)
    if plan.splits > 1:
        groups = device.groups(m * -(-n // 4), 256)
        reduce = [target, out, epilogue.bias, epilogue.residual, m, n, plan.splits, kinds[0], kinds[1], flags]
        device.launch("gemm_f32", "gemm_reduce", reduce, groups, work=4.0 * m * n * (plan.splits + 1))


def multiple(nbytes: int, *arrays: Array | None) -> bool:
    """Return whether all arrays start at multiples of this many bytes."""
    return all(a is None or a.address % nbytes == 0 for a in arrays)
