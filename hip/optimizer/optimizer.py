"""Gradient norm, clipping and AdamW on one flat buffer; nothing returns to the host. Kernel: optimizer.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, implements
from wgrad.hip.elementwise.elementwise import MOST_PARTS
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime


@implements("grad_norm")
def grad_norm(device: Runtime, g: Array) -> Array:
    parts = min(MOST_PARTS, -(-g.size // (GROUP * PER)))
    part, out = device.empty((parts, 2)), device.empty((2,))
    device.launch("optimizer", "grad_norm", [g, part, Long(g.size)], (parts, 1, 1), work=g.nbytes)
    device.launch("optimizer", "grad_norm_total", [part, out, parts], (1, 1, 1))
    return out


@implements("clip")
def clip(
    device: Runtime, norm: Array, hyper: Array, state: Array, loss_scale: Array, beta1: float, beta2: float
) -> None:
    arguments = [norm, hyper, state, loss_scale, float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2]
    device.launch("optimizer", "clip", arguments, (1, 1, 1), threads=64)


@implements("adamw")
def adamw(
    device: Runtime,
    p: Array,
    g: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    hyper: Array,
    state: Array,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_elements: int,
) -> None:
    scalars = [float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2, float(eps), float(weight_decay)]
    arguments = [p, g, exp_avg, exp_avg_sq, hyper, state, Long(p.size), Long(decay_elements), *scalars]
    device.launch("optimizer", "adamw", arguments, device.groups(p.size, 4 * GROUP), work=7 * p.nbytes)
