"""Gradients of LoRA's factors: gemm_matrix_lora.wgsl for both at once; gemm_skinny.wgsl, gemm_matrix_skinny.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.gemm import gemm_matrix_lora, gemm_matrix_skinny, gemm_skinny
from wgrad.wgsl.gemm.gemm import matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_skinny import MOST_RANK, Skinny
from wgrad.wgsl.gemm.plan import Limits, skinny_tile
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.runtime import Runtime


@implements("lora_du")
def lora_du(device: Runtime, dy: Array, b: Array, parts: tuple[int, ...], alpha: float) -> Array:
    rank = b.shape[1]
    out = device.empty((dy.shape[0], len(parts) * rank))
    for first in range(0, rank, MOST_RANK):
        some = min(MOST_RANK, rank - first)
        skinny = Skinny(dy.shape, dy.dtype.name, rank, some, True, False, False, parts, rank, first)
        _launch(device, skinny, dy, b, out, alpha, False)
    return out


@implements("lora_db")
def lora_db(device: Runtime, dy: Array, u: Array, parts: tuple[int, ...], out: Array | None, accumulate: bool) -> Array:
    rank = u.shape[1] // len(parts)
    out = device.empty((dy.shape[1], rank)) if out is None else out
    for first in range(0, rank, MOST_RANK):
        some = min(MOST_RANK, rank - first)
        skinny = Skinny(dy.shape, dy.dtype.name, u.shape[1], some, True, True, True, parts, rank, first)
        _launch(device, skinny, dy, u, out, 1.0, accumulate)
    return out


@implements("lora_grads")
def lora_grads(
    device: Runtime,
    dy: Array,
    b: Array,
    u: Array,
    parts: tuple[int, ...],
    alpha: float,
    out: Array | None,
    accumulate: bool,
) -> tuple[Array, Array]:
    at_once = gemm_matrix_lora.served(device, dy, b)
    if parts and not at_once:
        return lora_du(device, dy, b, parts, alpha), lora_db(device, dy, u, parts, out, accumulate)
    du, db = device.empty(u.shape), device.empty(b.shape) if out is None else out
    if at_once:
        gemm_matrix_lora.launch(device, dy, b, u, parts, alpha, du, db, accumulate)
    else:
        matmul(device, dy, b, Epilogue(du, alpha))
        matmul(device, dy, u, Epilogue(db, accumulate=accumulate), trans_a=True)
    return du, db


def _launch(device: Runtime, skinny: Skinny, x: Array, s: Array, out: Array, alpha: float, accumulate: bool) -> None:
    on_cores = skinny_tile(skinny, Limits.of(device))
    if on_cores is not None:
        gemm_matrix_skinny.launch(device, skinny, on_cores, x, s, out, alpha, accumulate)
    else:
        assert gemm_skinny.served(skinny)  # columns of a stack are multiples of 64, and there is no bfloat16 here
        gemm_skinny.launch(device, skinny, x, s, out, alpha, accumulate)
