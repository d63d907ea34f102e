"""The optimiser's step on the device: clipping with loss scale, AdamW. `grad_norm` is in reduce.py.

Shaders: optimizer_clip.wgsl, optimizer_adamw.wgsl. Nothing is read back: whether a step is applied is decided there.
"""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, Elements, compute_type, vector_width
from wgrad.wgsl.runtime.compile import Constant


class OptimizerOps(Elements):
    def clip(self, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float) -> None:
        """In place on state (float32 [8]) and loss_scale (float32 [1])."""
        params = [float(beta1), 1.0 - float(beta1), float(beta2), 1.0 - float(beta2)]
        self.launch("optimizer_clip", [norm, hyper, state, loss_scale], params, (1, 1, 1))

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
        vec = vector_width(p.size)
        constants: dict[str, Constant] = {"VEC": vec, "C_T": compute_type(vec)}
        rates = [float(beta1), 1.0 - float(beta1), float(beta2), 1.0 - float(beta2), float(eps), float(weight_decay)]
        for first, (w, grad, m, v) in self.flat_parts([p, g, exp_avg, exp_avg_sq]):
            n = w.size // vec
            decay = min(max(decay_elements - first, 0), w.size)
            groups = self.groups(n, 2 * GROUP)
            work = 7.0 * w.nbytes
            self.launch(
                "optimizer_adamw", [w, grad, m, v, hyper, state], [n, decay, *rates], groups, constants, work=work
            )
