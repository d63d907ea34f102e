"""Reference optimiser step (norm, clipping and loss scale, AdamW) and the sampling of a token."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, operator, up
from wgrad.device.contract import (
    HYPER_GROWTH_INTERVAL,
    HYPER_LR,
    HYPER_MAX_NORM,
    STATE_APPLIED,
    STATE_APPLY,
    STATE_BIAS1,
    STATE_BIAS2,
    STATE_FACTOR,
    STATE_GOOD,
    STATE_GRAD_NORM,
    STATE_SKIPPED,
)

CLIP_EPS = 1e-6  # added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does
MAX_LOSS_SCALE = 65536.0


class ReferenceOptimizer:
    @operator
    def grad_norm(self, g: np.ndarray) -> np.ndarray:
        compute = compute_dtype(g)
        finite = np.isfinite(g)
        kept = np.where(finite, up(g, compute), compute.type(0)).reshape(-1)
        return np.array([np.sum(kept * kept), g.size - np.count_nonzero(finite)], compute)

    @operator
    def clip(
        self,
        norm: np.ndarray,
        hyper: np.ndarray,
        state: np.ndarray,
        loss_scale: np.ndarray,
        *,
        beta1: float,
        beta2: float,
    ) -> None:
        """factor = min(1, max_norm / (norm + 1e-6)) / loss_scale. A sum that overflowed counts as not finite.

        The bias corrections 1 - beta^n are carried on as c = beta c + (1 - beta), from 0: no digits cancel.
        """
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
        self,
        p: np.ndarray,
        g: np.ndarray,
        exp_avg: np.ndarray,
        exp_avg_sq: np.ndarray,
        hyper: np.ndarray,
        state: np.ndarray,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay_elements: int,
    ) -> None:
        """Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2."""
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

    @operator
    def sample(
        self, logits: np.ndarray, uniform: np.ndarray, *, temperature: float, top_k: int, top_p: float
    ) -> np.ndarray:
        """top-p keeps a token when all tokens strictly more probable than it weigh less than top_p together, so that
        tokens of equal probability stay or go together; the most probable always stay."""
        if temperature == 0:
            return np.array([np.argmax(logits)], np.int32)
        scaled = logits.astype(np.float64) / temperature
        kept = np.ones(scaled.size, bool)
        if 0 < top_k < scaled.size:
            kept &= scaled >= np.partition(scaled, -top_k)[-top_k]
        p = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
        p /= p.sum()
        if top_p < 1:
            falling = np.sort(p)[::-1]
            before = np.concatenate([[0.0], np.cumsum(falling)])
            heavier = before[np.searchsorted(-falling, -p, side="left")]  # weight of all strictly more probable tokens
            kept &= (heavier < top_p) | (heavier == 0)
            p = np.where(kept, p, 0.0)
        cumulative = np.cumsum(p)
        index = int(np.searchsorted(cumulative, float(uniform[0]) * cumulative[-1], side="right"))
        return np.array([min(index, int(np.flatnonzero(p)[-1]))], np.int32)
