"""linear_cross_entropy: head product, loss and both gradients, a chunk of tokens at a time. Kernels: softmax.hip, and
the products."""

from __future__ import annotations

from typing import Any

from wgrad.device.memory import Array
from wgrad.hip.reduce import ReduceOps

# Logits of one chunk. Larger chunks make better products; this is small beside a model and its activations.
CHUNK_BYTES = 128 << 20


class LossOps(ReduceOps):
    """linear_cross_entropy (device/contract.py). The backward is part of the forward: logits are never kept."""

    gemm: Any

    def linear_cross_entropy(
        self, x: Array, weight: Array, targets: Array, *, need_dx: bool = True, need_dweight: bool = False
    ) -> tuple[Array, Array | None, Array | None]:
        """x [N, C], weight [V, C], targets int32 [N] -> loss float32 [1], dx float32 [N, C], dweight float32 [V, C]."""
        (n, c), v = x.shape, weight.shape[0]
        losses = self.empty((n,))
        dx = self.empty((n, c)) if need_dx else None
        dweight = self.empty((v, c)) if need_dweight else None
        rows = min(n, max(128, CHUNK_BYTES // (4 * v) // 128 * 128))
        # The last chunk may be shorter: its logits are a view of the same memory.
        memory = self.empty((rows, v))
        for first in range(0, n, rows):
            count = min(rows, n - first)
            part, logits = self.view(x, (count, c), first * c), self.view(memory, (count, v))
            self.gemm(part, weight, trans_b=True, out=logits)
            gradient = int(need_dx or need_dweight)
            arguments = [logits, targets, losses, v, first, gradient]
            self.launch("softmax", "cross_entropy", arguments, (count, 1, 1), work=3 * logits.nbytes)
            if dx is not None:
                self.gemm(logits, weight, out=self.view(dx, (count, c), first * c))
            if dweight is not None:
                self.gemm(logits, part, trans_a=True, out=dweight, accumulate=first > 0)
        return self.sum(losses), dx, dweight
