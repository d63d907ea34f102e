"""Cross-entropy of logits in memory. For vocabularies whose logits are too large, see `linear_cross_entropy`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, apply, index, lazy_of, reduced, view_of
from wgrad.autograd.ops.arithmetic import operand_of, record
from wgrad.autograd.ops.loss import IGNORE_INDEX
from wgrad.autograd.tensor import Tensor, edge_of, is_recording
from wgrad.device.errors import ShapeError


def check_labels(name: str, targets: Any, classes: int, ignored: int) -> None:
    """Check that labels on the host are classes or the ignored label."""
    numbers = np.asarray(targets)
    if numbers.dtype.kind in "iu":
        wrong = numbers[(numbers != ignored) & ((numbers < 0) | (numbers >= classes))]
        if wrong.size:
            raise ShapeError(
                f"{name}: targets must be from 0 to {classes - 1}, or {ignored} for rows to ignore, got {wrong[0]}"
            )


def _check_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(f'cross_entropy: reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not 0 <= label_smoothing < 1:
        raise ShapeError(f"cross_entropy: label_smoothing must be from 0 to below 1, got {label_smoothing}")


def cross_entropy(
    logits: Tensor,
    targets: Any,
    weight: Any = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the mean of -log softmax(logits)[target] over the targets that are not ignored.

    Args:
        logits: [N, C].
        targets: int32 [N], a Tensor or an array.
        weight: Weights of the classes, [C]; the mean is then a weighted one.
        ignore_index: The target of rows that do not count.
        reduction: "mean", "sum", or "none" for the loss of each row, which is 0 for ignored rows.
        label_smoothing: Share of the target that is spread over all classes.

    Returns:
        The loss, a scalar, or [N] with reduction "none".

    Raises:
        ShapeError: the shapes or an option are not as described.
    """
    labels = _labels(logits, targets, ignore_index)
    _check_options(reduction, label_smoothing)
    if weight is not None:
        return _weighted(logits, labels, weight, ignore_index, reduction, label_smoothing)
    device = logits.device
    z = view_of(logits.data, device)
    target = view_of(device.view(labels.array(), (logits.shape[0], 1)), device)
    largest = reduced("max", z, (1,), keepdim=True)
    norm = apply("log", reduced("sum", apply("exp", z - largest), (1,), keepdim=True)) + largest
    chosen = apply("eq", index(z.shape, 1, device), target)
    counted = apply("ne", target, float(ignore_index))
    over = (1,) if reduction == "none" else (0, 1)
    of_class = apply("where", apply("mul", chosen, counted), norm - z, 0.0)
    if isinstance(targets, Tensor):  # its values were not checked on the host: a target that is no class costs inf
        beyond = apply("add", apply("lt", target, 0.0), apply("gt", target, z.shape[1] - 1.0))
        of_class = apply("where", apply("mul", beyond, counted), math.inf, of_class)
    total = reduced("sum", of_class, over, keepdim=False)
    if label_smoothing:
        spread = label_smoothing / logits.shape[1]
        of_all = reduced("sum", apply("where", counted, norm - z, 0.0), over, keepdim=False)
        total = total * (1 - label_smoothing) + of_all * spread
        chosen = chosen * (1 - label_smoothing) + spread
    share: Any = 1.0
    if reduction == "mean":
        share = 1.0 / reduced("sum", counted, (0, 1), keepdim=False).astype(np.float32)
        total = total * share
    result = Tensor(total, device)
    if is_recording() and logits.requires_grad:
        dtype = logits.dtype

        def backward(dy: Any) -> list[Lazy]:
            seed = lazy_of(dy, device) * share
            if reduction == "none":
                seed = view_of(device.view(seed.array(), (logits.shape[0], 1)), device)
            return [((apply("exp", z - norm) - chosen) * counted * seed).astype(dtype)]

        record("cross_entropy", [result], [edge_of(logits)], backward, (z, norm, chosen, share))
    return result


def _weighted(
    logits: Tensor, labels: Lazy, weight: Any, ignored: int, reduction: str, label_smoothing: float
) -> Tensor:
    """Return the loss with a weight of each class."""
    shape = tuple(getattr(weight, "shape", ()))
    if label_smoothing or shape != logits.shape[1:]:
        raise ShapeError(
            f"cross_entropy: weight must be [C], here {list(logits.shape[1:])}, and goes without label_smoothing, got "
            f"{list(shape)} and {label_smoothing}"
        )
    target = Tensor(labels, logits.device)
    rows = cross_entropy(logits, target, ignore_index=ignored, reduction="none")
    of_class = Tensor(apply("eq", index(logits.shape, 1, logits.device), target.unsqueeze(1).lazy()), logits.device)
    factor: Any = (of_class * weight).sum(1)
    total: Tensor = rows * factor
    if reduction == "none":
        return total
    return total.sum() / factor.sum() if reduction == "mean" else total.sum()


def _labels(logits: Tensor, targets: Any, ignored: int) -> Lazy:
    """Check the shapes and dtype of logits and targets, and the values of targets on the host."""
    if not isinstance(targets, Tensor):
        check_labels("cross_entropy", targets, logits.shape[-1] if logits.ndim else 0, ignored)
    labels = targets.lazy() if isinstance(targets, Tensor) else operand_of("cross_entropy", targets, logits)
    if logits.ndim != 2 or not isinstance(labels, Lazy) or labels.shape != logits.shape[:1]:
        found = list(labels.shape) if isinstance(labels, Lazy) else "a number"
        raise ShapeError(
            f"cross_entropy: logits must be [N, C] and targets [N], got {list(logits.shape)} and {found}; "
            "use logits.reshape(-1, C), behind logits.movedim(1, -1) if axis 1 has the classes, and targets.reshape(-1)"
        )
    if labels.dtype.kind not in "iu":
        raise ShapeError(f"cross_entropy: targets must be integers, got {labels.dtype}")
    return labels
