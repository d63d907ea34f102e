"""Gradient norm, clipping and AdamW on one flat buffer; nothing returns to the host. Kernel: optimizer.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, Elements
from wgrad.hip.reduce import MOST_PARTS
from wgrad.hip.runtime.runtime import Long


class OptimizerOps(Elements):
    def grad_norm(self, g: Array) -> Array:
        """float32 [2]: sum of squares of the finite elements, number of elements that are not finite."""
        parts = max(1, min(MOST_PARTS, -(-g.size // (GROUP * PER))))
        part, out = self.empty((parts, 2)), self.empty((2,))
        self.launch("optimizer", "grad_norm", [g, part, Long(g.size)], (parts, 1, 1), work=g.nbytes)
        self.launch("optimizer", "grad_norm_total", [part, out, parts], (1, 1, 1))
        return out

    def clip(self, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float) -> None:
        """One work-item, in place on `state` and `loss_scale`; see the contract."""
        arguments = [norm, hyper, state, loss_scale, float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2]
        self.launch("optimizer", "clip", arguments, (1, 1, 1), threads=64)

    def adamw(
        self,
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
        """In place on p, exp_avg, exp_avg_sq (float32 [n])."""
        if not p.size:
            return
        scalars = [float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2, float(eps), float(weight_decay)]
        arguments = [p, g, exp_avg, exp_avg_sq, hyper, state, Long(p.size), Long(decay_elements), *scalars]
        self.launch("optimizer", "adamw", arguments, self.groups(p.size, 4 * GROUP), work=7 * p.nbytes)
