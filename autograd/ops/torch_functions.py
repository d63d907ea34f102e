"""Functions of torch.nn.functional that are combinations of others, which give them their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.host_arrays import to_device
from wgrad.autograd.lazy import apply, broadcast, index, lazy_of, view_of
from wgrad.autograd.ops.activation import gelu as gelu_operator
from wgrad.autograd.ops.arithmetic import expm1, gelu_exact, record, softplus, where
from wgrad.autograd.ops.cross_entropy import check_labels
from wgrad.autograd.ops.dropout import dropout as keep_some
from wgrad.autograd.ops.loss import IGNORE_INDEX
from wgrad.autograd.random_numbers import drawn_seed
from wgrad.autograd.tensor import Tensor, edge_of, is_recording
from wgrad.autograd.tensor_methods import is_exact_gelu
from wgrad.device.errors import ShapeError
from wgrad.device.expression import row_major


def _reduced(name: str, values: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(f'{name}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def _alike(name: str, x: Tensor, target: Any) -> None:
    shape = tuple(getattr(target, "shape", ()))
    if shape != x.shape:
        raise ShapeError(f"{name}: target must have the shape of input {list(x.shape)}, got {list(shape)}; reshape it")


def mse_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the mean (or "sum", or with "none" each) of (x - target)^2."""
    _alike("mse_loss", x, target)
    return _reduced("mse_loss", (x - target).square(), reduction)


def l1_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the mean (or "sum", or with "none" each) of |x - target|."""
    _alike("l1_loss", x, target)
    return _reduced("l1_loss", (x - target).abs(), reduction)


def binary_cross_entropy_with_logits(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the mean (or "sum", or with "none" each) of softplus(x) - x * target; x are logits, targets 0 to 1."""
    _alike("binary_cross_entropy_with_logits", x, target)
    return _reduced("binary_cross_entropy_with_logits", softplus(x) - x * target, reduction)


def binary_cross_entropy(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """Return the mean (or "sum", or with "none" each) of the cross entropy of probabilities x with targets 0 to 1.

    Logarithms are at least -100, as in PyTorch. `binary_cross_entropy_with_logits` is more exact.
    """
    _alike("binary_cross_entropy", x, target)
    least = math.exp(-86)  # the smallest number whose logarithm every GPU has
    yes, no = (where(p > least, where(p > least, p, 1.0).log(), -100.0) for p in (x, 1 - x))
    return _reduced("binary_cross_entropy", -(yes * target + no * (1 - target)), reduction)


def smooth_l1_loss(x: Tensor, target: Any, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Return the mean (or "sum", or with "none" each) of d^2 / (2 beta) for d = |x - target|.

    Where d is beta or more, it is d - beta / 2.
    """
    return _reduced("smooth_l1_loss", _smooth_l1("smooth_l1_loss", x, target, "beta", beta), reduction)


def huber_loss(x: Tensor, target: Any, *, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return `delta` times `smooth_l1_loss` with beta = delta."""
    return _reduced("huber_loss", _smooth_l1("huber_loss", x, target, "delta", delta), reduction) * delta


def _smooth_l1(function: str, x: Tensor, target: Any, name: str, beta: float) -> Tensor:
    """Return the loss of each element. name: of beta in errors of the function."""
    if beta <= 0:
        raise ShapeError(f"{function}: {name} must be positive, got {beta}; use l1_loss for 0")
    _alike(function, x, target)
    away = (x - target).abs()
    return where(away < beta, away.square() * (0.5 / beta), away - 0.5 * beta)


def nll_loss(log_p: Tensor, targets: Any, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean") -> Tensor:
    """Return the mean (or "sum", or with "none" each) of -log_p[n, targets[n]], for log_p [N, C] and targets int32 [N].

    Rows whose target is `ignore_index` do not count; with "none" they are 0. `cross_entropy` takes logits.
    """
    labels = targets
    if not isinstance(targets, Tensor):
        check_labels("nll_loss", targets, log_p.shape[-1] if log_p.ndim else 0, ignore_index)
        labels = Tensor(to_device("nll_loss", targets, log_p.device), log_p.device)
    if log_p.ndim != 2 or tuple(labels.shape) != log_p.shape[:1]:
        raise ShapeError(
            f"nll_loss: log_p must be [N, C] and targets [N], got {list(log_p.shape)} and {list(labels.shape)}"
        )
    counted = labels.ne(ignore_index)
    loss = where(counted, -log_p.gather(1, labels.reshape(-1, 1)).reshape(-1), 0)
    return loss.sum() / counted.sum() if reduction == "mean" else _reduced("nll_loss", loss, reduction)


def one_hot(ids: Tensor, num_classes: int) -> Tensor:
    """Return float32 [..., num_classes] for ids int32 [...]: 1 at each id, else 0."""
    if num_classes < 1:
        raise ShapeError(f"one_hot: num_classes must be positive, got {num_classes}")
    shape = (*ids.shape, num_classes)
    chosen = apply("eq", index(shape, len(shape) - 1, ids.device), ids.unsqueeze(-1).lazy())
    return Tensor(chosen.astype(np.float32), ids.device)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Return x / max(norm(x), eps), with the p-norm over an axis."""
    return x / x.norm(p, dim, True).clamp(min=eps)


def cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the sum of a b over an axis, divided by max(|a|, eps) max(|b|, eps); a and b are broadcast first."""
    shape = broadcast("cosine_similarity", a.shape, b.shape)
    return (normalize(a.expand(*shape), 2, dim, eps) * normalize(b.expand(*shape), 2, dim, eps)).sum(dim)


def dropout(x: Tensor, p: float = 0.5, seed: Any = None, stream: int = 0, training: bool = True) -> Tensor:
    """Keep each element with probability 1 - p and divide it by 1 - p.

    Args:
        x: A Tensor of floats.
        p: Probability of dropping an element.
        seed: uint32 [2] on the device; None draws one. A recorded step (`wgrad.compile`) needs its own.
        stream: A number that differs between the layers that share a seed.
        training: False returns x unchanged.
    """
    if not training:
        return x
    return keep_some(x, p, drawn_seed(x.device) if seed is None else seed, stream)


def gelu(x: Tensor, approximate: str = "tanh") -> Tensor:
    """Return GELU of x: in the tanh form, or with "none" the exact form, torch's default."""
    return gelu_exact(x) if is_exact_gelu(approximate) else gelu_operator(x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive, else negative_slope * x."""
    return where(x > 0, x, x * negative_slope)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha * (exp(x) - 1)."""
    return where(x > 0, x, expm1(where(x > 0, 0.0, x)) * alpha)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad x with `value` before and after its last axes.

    pad: (before, after) of the last axis, then of the one before it, ...
    """
    if mode != "constant":
        raise ShapeError(f'pad: mode must be "constant", got {mode!r}; use wgrad.cat with slices')
    if len(pad) % 2 or len(pad) > 2 * x.ndim or min(pad, default=0) < 0:
        raise ShapeError(f"pad: pad must be pairs of numbers from 0 for at most {x.ndim} axes, got {list(pad)}")
    around = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    shape = tuple(before + n + after for n, (before, after) in zip(x.shape, around))
    device, strides = x.device, row_major(shape)
    place = strides, sum(before * stride for (before, _), stride in zip(around, strides))
    whole = device.empty(shape, x.dtype)
    device.fill(whole, value)
    x.lazy().write(whole, place)
    result = Tensor(whole, device)
    if is_recording() and x.requires_grad:
        inner = x.shape

        def backward(dy: Any) -> list[Any]:
            given = lazy_of(dy, device)
            return [view_of(given.array(), device).viewed(inner, *place)]

        record("pad", [result], [edge_of(x)], backward)
    return result
