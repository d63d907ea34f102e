"""Check gradients on any device against central differences in float64, with the operator in the middle of a graph.

y = sum(c * op(a * x + b)), with a, b and c other than 0 and 1, reveals a backward that drops the upstream gradient, or
does not pass on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device

STEP = 1e-5  # rounding error / STEP and STEP squared are both near 1e-11 in float64
# Limit for a correct gradient: the error of the differences, times a factor for sums and curvature.
LIMIT = 1000 * (float(np.finfo(np.float64).eps) / STEP + STEP * STEP)
INNER_SCALE = 0.7


Operator = Callable[..., Tensor | Sequence[Tensor]]


def gradcheck(
    op: Operator,
    *inputs: np.ndarray,
    rng: np.random.Generator,
    device: Device | None = None,
    checks: int = 24,
    dtype: Any = np.float64,
    differences: Operator | None = None,
) -> float:
    """Return the largest relative difference between a gradient of the tape and central differences.

    It is relative to the largest gradient of an input, or to a thousandth of y if that is more, because differences of
    y cannot resolve a gradient of 0.

    Args:
        op: Function of a Tensor for each input that returns one or several Tensors.
        *inputs: float64 arrays.
        rng: Draws the elements to compare.
        device: Device of the tape; None: a reference device.
        checks: Most elements of each input to compare.
        dtype: Dtype of the tape.
        differences: The same function for the reference device, if op holds arrays of another one.
    """
    device, reference = device or ReferenceDevice(), ReferenceDevice()
    exact = differences or op
    if differences is None and isinstance(device, ReferenceDevice):
        reference = device
    shifts = [0.1 * rng.standard_normal(x.shape) for x in inputs]
    weights: list[np.ndarray] = []

    def loss(op: Operator, leaves: Sequence[Tensor], where: Device, kind: Any) -> Tensor:
        inner = [F.add(F.scale(x, INNER_SCALE), where.upload(s.astype(kind))) for x, s in zip(leaves, shifts)]
        result = op(*inner)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if not weights:
            weights.extend(1.5 + rng.standard_normal(out.shape) for out in outputs)
        terms = [F.sum(F.mul(out, where.upload(c.astype(kind)))) for out, c in zip(outputs, weights)]
        total = terms[0]
        for term in terms[1:]:
            total = F.add(total, term)
        return total

    def value(arrays: Sequence[np.ndarray]) -> float:
        with F.no_grad():
            leaves = [Tensor(reference.upload(a), reference) for a in arrays]
            return float(loss(exact, leaves, reference, np.float64).numpy()[0])

    arrays = [np.array(x, np.float64) for x in inputs]
    leaves = [Tensor(device.upload(a.astype(dtype)), device, requires_grad=True) for a in arrays]
    loss(op, leaves, device, dtype).backward()
    grads = [None if leaf.gradient is None else device.download(leaf.gradient) for leaf in leaves]
    return max(_compare(value, arrays, i, grad, rng, checks) for i, grad in enumerate(grads))


def _compare(
    value: Callable[[Sequence[np.ndarray]], float],
    arrays: list[np.ndarray],
    i: int,
    grad: Any,
    rng: np.random.Generator,
    checks: int,
) -> float:
    """Return the relative difference for input i."""
    if grad is None:
        return float("inf")
    flat = arrays[i].reshape(-1)
    chosen = rng.permutation(flat.size)[:checks]
    numeric = np.empty(chosen.size)
    for n, j in enumerate(chosen):
        kept = flat[j]
        flat[j] = kept + STEP
        above = value(arrays)
        flat[j] = kept - STEP
        numeric[n] = (above - value(arrays)) / (2 * STEP)
        flat[j] = kept
    tape = np.asarray(grad, np.float64).reshape(-1)
    tiny = float(np.finfo(np.float64).tiny)  # so that zeros are not divided by 0
    scale = max(float(np.abs(numeric).max()), float(np.abs(tape).max()), 1e-3 * abs(value(arrays)), tiny)
    return float(np.abs(tape[chosen] - numeric).max()) / scale
