"""Gradients of LoRA's factors under a stack of weights: one GEMM each."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import implements
from wgrad.hip.gemm.gemm import Epilogue, dense_product
from wgrad.hip.runtime.columns import apart, together
from wgrad.hip.runtime.runtime import Runtime


@implements("lora_du")
def lora_du(device: Runtime, dy: Array, b: Array, parts: tuple[int, ...], alpha: float) -> Array:
    found, row, rank = [], 0, b.shape[1]
    for grad in apart(device, dy, parts):
        right = device.view(b, (grad.shape[1], rank), row * rank)
        found.append(dense_product(device, grad, right, None, np.float32, Epilogue(alpha)))
        row += grad.shape[1]
    return together(device, found)


@implements("lora_db")
def lora_db(device: Runtime, dy: Array, u: Array, parts: tuple[int, ...], out: Array | None, accumulate: bool) -> Array:
    row, rank = 0, u.shape[1] // len(parts)
    out = device.empty((dy.shape[1], rank)) if out is None else out
    ranks = apart(device, u, (rank,) * len(parts))
    for grad, right in zip(apart(device, dy, parts), ranks):
        target = device.view(out, (grad.shape[1], rank), row * rank)
        dense_product(device, grad, right, target, np.float32, Epilogue(accumulate=accumulate), trans_a=True)
        row += grad.shape[1]
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
    if parts:
        return lora_du(device, dy, b, parts, alpha), lora_db(device, dy, u, parts, out, accumulate)
    du = dense_product(device, dy, b, None, np.float32, Epilogue(alpha))
    return du, dense_product(device, dy, u, out, np.float32, Epilogue(accumulate=accumulate), trans_a=True)
