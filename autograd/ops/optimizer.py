"""The optimizer step: gradient norm, clipping and loss scale, AdamW. All parameters are in one flat float32 buffer."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, up
from wgrad.device.contract import Array

# Optimizer scalars live on the device, so that a recorded step can be replayed. `hyper` is float32 [4] and written by
# the host each step (max_norm 0: no clipping); `state` is float32 [8] and belongs to the device.
HYPER_LR, HYPER_MAX_NORM, HYPER_GROWTH_INTERVAL = 0, 1, 2
HYPER_SIZE = 4
STATE_APPLIED = 0  # steps applied so far (float32 counts exactly to 2^24)
STATE_GOOD = 1  # steps since the loss scale last changed
STATE_APPLY = 2  # 1: this step is applied, 0: skipped
STATE_FACTOR = 3  # gradients are multiplied by this
STATE_GRAD_NORM = 4  # norm before clipping, divided by the loss scale; -1 where a gradient was not finite
STATE_BIAS1, STATE_BIAS2 = 5, 6  # 1 - beta^applied
STATE_SKIPPED = 7  # steps skipped so far
STATE_SIZE = 8

CLIP_EPS = 1e-6  # added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does
MAX_LOSS_SCALE = 65536.0


@operator
def grad_norm(args: Args, g: Array) -> None:
    """Flat gradients [n] -> float32 [2]: sum of squares of the finite elements, number that are not finite."""
    args.array("g", g, "n", "f32", "pass the flat gradient buffer")


@grad_norm.reference
def _(g: np.ndarray) -> np.ndarray:
    compute = compute_dtype(g)
    finite = np.isfinite(g)
    kept = np.where(finite, up(g, compute), compute.type(0)).reshape(-1)
    return np.array([np.sum(kept * kept), g.size - np.count_nonzero(finite)], compute)


@operator
def clip(args: Args, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float) -> None:
    """Compute the factor of the gradients, the bias corrections and the loss scale of a step, in place on `state` and
    `loss_scale` (float32 [1]), in one thread; HYPER_* and STATE_* above give the layouts.

    factor = min(1, max_norm / (norm + 1e-6)) / loss_scale. The step is skipped if a gradient is not finite or the sum
    of squares overflowed. Dynamic loss scale: halved at a skip, down to 1; doubled after growth_interval good steps, up
    to 65536; constant if growth_interval is 0."""
    args.array("norm", norm, "2", "f32", "pass what grad_norm returns")
    args.array("hyper", hyper, str(HYPER_SIZE), "f32").array("state", state, str(STATE_SIZE), "f32")
    args.array("loss_scale", loss_scale, "1", "f32")


@clip.reference
def _(
    norm: np.ndarray, hyper: np.ndarray, state: np.ndarray, loss_scale: np.ndarray, beta1: float, beta2: float
) -> None:
    # The bias corrections 1 - beta^n are updated as c = beta c + (1 - beta), from 0, which cancels no digits.
    compute = compute_dtype(norm, hyper, state, loss_scale)
    one, interval = compute.type(1), hyper[HYPER_GROWTH_INTERVAL]
    if norm[1] > 0 or not np.isfinite(norm[0]):
        state[STATE_APPLY], state[STATE_FACTOR], state[STATE_GRAD_NORM] = 0, 0, -1
        state[STATE_SKIPPED] += 1
        state[STATE_GOOD] = 0
        if interval > 0:
            loss_scale[0] = max(one, up(loss_scale, compute)[0] / 2)
        return
    total = np.sqrt(up(norm, compute)[0]) / up(loss_scale, compute)[0]
    factor = one / up(loss_scale, compute)[0]
    if hyper[HYPER_MAX_NORM] > 0:
        factor *= min(one, up(hyper, compute)[HYPER_MAX_NORM] / (total + compute.type(CLIP_EPS)))
    state[STATE_APPLY], state[STATE_FACTOR], state[STATE_GRAD_NORM] = 1, factor, total
    state[STATE_APPLIED] += 1
    state[STATE_BIAS1] = state[STATE_BIAS1] * compute.type(beta1) + compute.type(1 - beta1)
    state[STATE_BIAS2] = state[STATE_BIAS2] * compute.type(beta2) + compute.type(1 - beta2)
    state[STATE_GOOD] += 1
    if interval > 0 and state[STATE_GOOD] >= interval:
        loss_scale[0] = min(compute.type(MAX_LOSS_SCALE), loss_scale[0] * 2)
        state[STATE_GOOD] = 0


@operator
def adamw(
    args: Args,
    p: Array,
    g: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    hyper: Array,
    state: Array,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_elements: int,
) -> None:
    """Update p, exp_avg and exp_avg_sq (float32 [n]) in place. Decoupled weight decay on the first `decay_elements`.
    Does nothing if state[STATE_APPLY] is 0.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2."""
    for name, array in (("p", p), ("g", g), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        args.array(name, array, "n", "f32", "all four are flat buffers of one size")
    args.array("hyper", hyper, str(HYPER_SIZE), "f32").array("state", state, str(STATE_SIZE), "f32")
    args.rule(
        0 <= decay_elements <= args.size["n"],
        f"decay_elements must be between 0 and n = {args.size['n']}, got {decay_elements}; "
        "decayed parameters come first in the buffer",
    )


@adamw.reference
def _(
    p: np.ndarray,
    g: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    hyper: np.ndarray,
    state: np.ndarray,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_elements: int,
) -> None:
    if state[STATE_APPLY] == 0:
        return
    kind = compute_dtype(p, g).type
    grad, lr = g * kind(state[STATE_FACTOR]), kind(hyper[HYPER_LR])
    exp_avg *= kind(beta1)
    exp_avg += kind(1 - beta1) * grad
    exp_avg_sq *= kind(beta2)
    exp_avg_sq += kind(1 - beta2) * grad * grad
    p[:decay_elements] -= lr * kind(weight_decay) * p[:decay_elements]
    denominator = np.sqrt(exp_avg_sq / kind(state[STATE_BIAS2])) + kind(eps)
    p -= lr * (exp_avg / kind(state[STATE_BIAS1])) / denominator
