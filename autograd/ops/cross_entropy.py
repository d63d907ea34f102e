"""Cross-entropy of logits that stand in memory. `linear_cross_entropy` is for vocabularies whose logits should not."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, apply, index, lazy_of, reduced, view_of
from wgrad.autograd.ops.arithmetic import operand_of, record
from wgrad.autograd.ops.loss import IGNORE_INDEX
from wgrad.autograd.tensor import Tensor, edge_of, is_recording
from wgrad.device.errors import ShapeError


def cross_entropy(logits: Tensor, targets: Any, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean") -> Tensor:
    """The mean (or "sum") over the targets that are not ignored of -log softmax(logits)[target].

    logits [N, C]; targets int32 [N], a Tensor or an array.
    """
    labels = targets.lazy() if isinstance(targets, Tensor) else operand_of("cross_entropy", targets, logits)
    if logits.ndim != 2 or not isinstance(labels, Lazy) or labels.shape != logits.shape[:1]:
        found = list(labels.shape) if isinstance(labels, Lazy) else "a number"
        raise ShapeError(
            f"cross_entropy: logits must be [N, C] and targets [N], got {list(logits.shape)} and {found}; reshape them"
        )
    if labels.dtype.kind not in "iu":
        raise ShapeError(f"cross_entropy: targets must be integers, got {labels.dtype}")
    if reduction not in ("mean", "sum"):
        raise ShapeError(f'cross_entropy: reduction must be "mean" or "sum", got {reduction!r}')
    device = logits.device
    z = view_of(logits.data, device)
    target = view_of(device.view(labels.array(), (logits.shape[0], 1)), device)
    largest = reduced("max", z, (1,), keepdim=True)
    norm = apply("log", reduced("sum", apply("exp", z - largest), (1,), keepdim=True)) + largest
    chosen = apply("eq", index(z.shape, 1, device), target)
    counted = apply("ne", target, float(ignore_index))
    total = reduced("sum", apply("where", apply("mul", chosen, counted), norm - z, 0.0), (0, 1), keepdim=False)
    share: Any = 1.0
    if reduction == "mean":
        share = 1.0 / reduced("sum", counted, (0, 1), keepdim=False).astype(np.float32)
        total = total * share
    result = Tensor(total, device)
    if is_recording() and logits.requires_grad:
        dtype = logits.dtype

        def backward(dy: Any) -> list[Lazy]:
            seed = lazy_of(dy, device) * share
            return [((apply("exp", z - norm) - chosen) * counted * seed).astype(dtype)]

        record("cross_entropy", [result], [edge_of(logits)], backward)
    return result
