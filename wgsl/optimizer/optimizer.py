"""The optimizer's step on the device: clipping with loss scale, AdamW. `grad_norm` is in reduce.py.

Shaders: optimizer_clip.wgsl, optimizer_adamw.wgsl. Nothing is read back: the device decides whether a step is applied.
"""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, compute_type, flat_parts, vector_width
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("clip")
def clip(
    device: Runtime, norm: Array, hyper: Array, state: Array, loss_scale: Array, beta1: float, beta2: float
) -> None:
    params = [float(beta1), 1.0 - float(beta1), float(beta2), 1.0 - float(beta2)]
    device.launch("optimizer_clip", [norm, hyper, state, loss_scale], params, (1, 1, 1))


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
    vec = vector_width(p.size)
    constants: dict[str, Constant] = {"VEC": vec, "C_T": compute_type(vec)}
    rates = [float(beta1), 1.0 - float(beta1), float(beta2), 1.0 - float(beta2), float(eps), float(weight_decay)]
    for first, (w, grad, m, v) in flat_parts(device, [p, g, exp_avg, exp_avg_sq]):
        n = w.size // vec
        decay = min(max(decay_elements - first, 0), w.size)
        groups = device.groups(n, 2 * GROUP)
        work = 7.0 * w.nbytes
        device.launch(
            "optimizer_adamw", [w, grad, m, v, hyper, state], [n, decay, *rates], groups, constants, work=work
        )
