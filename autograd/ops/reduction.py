"""Sums, means and maxima of Tensors over axes; the elementwise functions before them run in the same launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.lazy import EXACT, Lazy, apply, index, lazy_of, reduced, view_of
from wgrad.autograd.ops.arithmetic import record
from wgrad.autograd.ops.movement import transpose
from wgrad.autograd.ops.softmax import softmax as softmax_of_rows
from wgrad.autograd.tensor import Tensor, edge_of, is_recording
from wgrad.autograd.tensor_methods import Axes, axis_of, implements_method
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError


def _axes(name: str, dim: Axes, rank: int) -> tuple[int, ...]:
    given = (dim,) if dim is not None and not isinstance(dim, Sequence) else tuple(dim or range(rank))
    if not rank:
        given = tuple(axis for axis in given if axis not in (0, -1))  # PyTorch lets a Tensor without axes have these
    axes = sorted(axis_of(name, axis, rank) for axis in given)
    if len({*axes}) < len(axes):
        raise ShapeError(f"{name}: dim must name an axis once, got {list(given)}")
    return tuple(axes)


def _spread(dy: Any, device: Device, shape: tuple[int, ...], axes: Sequence[int]) -> Lazy:
    """Return the gradient of a reduction, repeated over the reduced axes."""
    given = lazy_of(dy, device)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    if given.shape != kept and tuple(axes) != tuple(range(len(axes))):  # not all reduced axes are leading ones
        if not given.is_view:
            given = view_of(given.array(), device)
        strides, offset = given.layout()
        left = iter(strides)
        given = given.viewed(kept, [0 if axis in axes else next(left) for axis in range(len(kept))], offset)
    return given.expanded(shape)


def _reduction(
    name: str, kind: str, x: Tensor, dim: Axes, keepdim: bool, scale: float, slope: Any, saved: Any = ()
) -> Tensor:
    axes = _axes(name, dim, x.ndim)
    source = x.lazy()
    y = reduced(kind, source * scale if scale != 1.0 else source, axes, keepdim)
    result = Tensor(y, x.device)
    if is_recording() and x.requires_grad:
        shape, dtype = x.shape, x.dtype
        device = x.device

        def backward(dy: Any) -> list[Lazy]:
            return [slope(_spread(dy, device, shape, axes)).astype(dtype)]

        record(name, [result], [edge_of(x)], backward, saved)
    return result


@implements_method("sum")
def sum(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    total = _reduction("sum", "sum", x, dim, keepdim, 1.0, lambda dy: dy)
    return total.to(np.int32) if x.dtype == np.uint32 else total  # of a mask, which the host may subtract from


@implements_method("mean")
def mean(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    part = 1.0 / math.prod(x.shape[axis] for axis in _axes("mean", dim, x.ndim))
    return _reduction("mean", "sum", x, dim, keepdim, part, lambda dy: dy * part)


@implements_method("amax")
def amax(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    axes, source = _axes("amax", dim, x.ndim), x.lazy()

    def slope(dy: Lazy) -> Lazy:
        largest = apply("eq", source, reduced("max", source, axes, keepdim=True))
        return dy * largest / reduced("sum", largest, axes, keepdim=True)

    return _reduction("amax", "max", x, dim, keepdim, 1.0, slope, (source,))


@implements_method("argmax")
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None or (not x.ndim and dim in (0, -1)):
        found = argmax(x.reshape(-1), 0)
        return found.reshape((1,) * x.ndim) if keepdim else found
    axis = axis_of("argmax", dim, x.ndim)
    last = x.shape[axis] - 1
    if last >= EXACT:
        raise ShapeError(f"argmax: an axis must have at most {EXACT} elements, got {last + 1}; use x.numpy().argmax()")
    source = x.lazy()
    is_largest = apply("eq", source, reduced("max", source, (axis,), keepdim=True))
    place = apply("where", is_largest, -index(x.shape, axis, x.device), -float(last))
    largest = reduced("max", place, (axis,), keepdim)
    return Tensor(apply("neg", largest, dtype=np.dtype(np.int32)), x.device)


@implements_method("softmax")
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax over an axis."""
    axis = axis_of("softmax", dim, max(x.ndim, 1))
    if x.ndim < 2:
        return softmax_of_rows(x.reshape(1, -1)).reshape(x.shape)
    if axis == x.ndim - 1:
        return softmax_of_rows(x)
    return transpose(softmax_of_rows(transpose(x, axis, -1)), axis, -1)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the logarithm of the softmax over an axis."""
    return x.log_softmax(dim)
