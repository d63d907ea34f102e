"""Rearranging Tensors: permuting, repeating, slicing, splitting and joining axes.

All but joining return views, which cost no launch until an operator needs row-major memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, broadcast, joined_dtype, lazy_of, summed_to, view_of
from wgrad.autograd.ops.arithmetic import device_of, record
from wgrad.autograd.ops.picking import picked
from wgrad.autograd.tensor import Tensor, edge_of, is_recording
from wgrad.autograd.tensor_methods import Axes, axis_of, implements_method
from wgrad.device.errors import ShapeError
from wgrad.device.expression import row_major
from wgrad.device.shown import short


def _viewed(name: str, x: Tensor, made: Lazy, backward: Any) -> Tensor:
    """Return a Tensor of a view of x. backward: maps the Lazy gradient of the view to that of x."""
    result = Tensor(made, x.device)
    if is_recording() and x.requires_grad:
        device = x.device
        record(name, [result], [edge_of(x)], lambda dy: [backward(lazy_of(dy, device))])
    return result


@implements_method("permute")
def permute(x: Tensor, axes: Sequence[Any]) -> Tensor:
    order = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], Sequence) else tuple(axes)
    order = tuple(axis_of("permute", a, x.ndim) for a in order)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"permute: axes must name each axis of {list(x.shape)} once, got {list(axes)}")
    inverse = tuple(order.index(a) for a in range(x.ndim))
    return _viewed("permute", x, x.lazy().permuted(order), lambda dy: dy.permuted(inverse))


@implements_method("transpose")
def transpose(x: Tensor, first: int, second: int) -> Tensor:
    a, b = axis_of("transpose", first, x.ndim), axis_of("transpose", second, x.ndim)
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return permute(x, order)


@implements_method("expand")
def expand(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    wanted = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else tuple(sizes)
    missing = len(wanted) - x.ndim
    shape = tuple(x.shape[i - missing] if n == -1 and i >= missing else n for i, n in enumerate(wanted))
    if missing < 0 or broadcast("expand", x.shape, shape) != shape:
        raise ShapeError(f"expand: shape must be one that {list(x.shape)} is repeated to, got {list(wanted)}")
    before = x.shape
    return _viewed("expand", x, x.lazy().expanded(shape), lambda dy: summed_to(dy, before))


@implements_method("unsqueeze")
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    at = axis_of("unsqueeze", dim, x.ndim + 1)
    return x.reshape(*x.shape[:at], 1, *x.shape[at:])


@implements_method("squeeze")
def squeeze(x: Tensor, dim: Axes = None) -> Tensor:
    given = range(x.ndim) if dim is None else dim if isinstance(dim, Sequence) else (dim,)
    gone = {axis_of("squeeze", axis, max(x.ndim, 1)) for axis in given}
    return x.reshape([n for axis, n in enumerate(x.shape) if n != 1 or axis not in gone])


@implements_method("flatten")
def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    at, last = (axis_of("flatten", dim, max(x.ndim, 1)) for dim in (start_dim, end_dim))
    if last < at:
        raise ShapeError(f"flatten: end_dim must not be before start_dim, got {start_dim} to {end_dim}")
    return x.reshape(*x.shape[:at], math.prod(x.shape[at : last + 1]), *x.shape[last + 1 :])


@implements_method("getitem")
def getitem(x: Tensor, index: Any) -> Tensor:
    if any(isinstance(i, Tensor | np.ndarray | list) for i in (index if isinstance(index, tuple) else (index,))):
        return picked(x, index if isinstance(index, tuple) else (index,))
    shape, places, keep = _sliced(x.shape, index if isinstance(index, tuple) else (index,))
    lazy = x.lazy()
    strides, offset = lazy.layout()
    before, dtype, device = x.shape, x.dtype, x.device

    def view(strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
        start = sum(first * stride for (first, _), stride in zip(places, strides))
        return tuple(0 if axis is None else places[axis][1] * strides[axis] for axis in keep), start

    steps, start = view(strides)

    def backward(dy: Lazy) -> Lazy:
        whole = device.zeros(before, dtype)
        dy.write(whole, view(row_major(before)))
        return view_of(whole, device)

    return _viewed("getitem", x, lazy.viewed(shape, steps, offset + start), backward)


def _sliced(
    shape: tuple[int, ...], index: tuple[Any, ...]
) -> tuple[list[int], list[tuple[int, int]], list[int | None]]:
    """Return the shape of a slice, the first index and step along each axis of the whole, and for each axis of the
    slice its axis of the whole (None: a new axis)."""
    given = [i for i in index if i is not None and i is not Ellipsis]
    if len(given) > len(shape) or sum(i is Ellipsis for i in index) > 1:
        raise ShapeError(f"a slice must have at most {len(shape)} indices for shape {list(shape)}, got {len(given)}")
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    made: list[int] = []
    places: list[tuple[int, int]] = []
    keep: list[int | None] = []
    for i in index:
        if i is None:
            made.append(1)
            keep.append(None)
        elif i is Ellipsis:
            for n in shape[len(places) : len(shape) - (len(given) - len(places))]:
                keep.append(len(places))
                places.append((0, 1))
                made.append(n)
        elif isinstance(i, slice):
            n = shape[len(places)]
            first, last, step = i.indices(n)
            if step < 1 or last <= first:
                problem = "have a positive step (flip reverses an axis)" if step < 1 else "not be empty"
                raise ShapeError(f"a slice must {problem}, got {_written(i)} of an axis of {n}")
            keep.append(len(places))
            places.append((first, step))
            made.append(-(-(last - first) // step))
        else:
            if isinstance(i, bool | np.bool_) or not isinstance(i, int | np.integer):
                raise ShapeError(
                    f"an index must be a whole number, a slice, None, ... or an array, got {short(i)}; convert it with "
                    "int()"
                )
            n, at = shape[len(places)], int(i)
            if not -n <= at < n:
                raise ShapeError(f"an index must be from {-n} to {n - 1} for an axis of {n}, got {short(at)}")
            places.append((at % n, 1))
    return made, places, keep


def _written(i: slice) -> str:
    return ":".join("" if part is None else short(part) for part in (i.start, i.stop, i.step))


@implements_method("split")
def split(x: Tensor, size: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    axis = axis_of("split", dim, x.ndim)
    lazy, device, shape, dtype = x.lazy(), x.device, x.shape, x.dtype
    sizes = _sizes(size, shape[axis])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    strides, offset = lazy.layout()
    parts = [(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes]
    made = [Tensor(lazy.viewed(part, strides, offset + at * strides[axis]), device) for part, at in zip(parts, starts)]
    if is_recording() and x.requires_grad:
        along = row_major(shape)

        def backward(*grads: Any) -> list[Lazy]:
            lacks = any(grad is None for grad in grads)
            whole = device.zeros(shape, dtype) if lacks else device.empty(shape, dtype)
            for grad, at in zip(grads, starts):
                if grad is not None:
                    lazy_of(grad, device).write(whole, (along, at * along[axis]))
            return [view_of(whole, device)]

        record("split", made, [edge_of(x)], backward)
    return made


def _sizes(size: int | Sequence[int], whole: int) -> list[int]:
    """Return the sizes of the parts of an axis."""
    if isinstance(size, Sequence):
        if min(size, default=0) < 1 or sum(size) != whole:
            raise ShapeError(f"split: sizes must be positive and add up to the {whole} of the axis, got {list(size)}")
        return list(size)
    if size < 1:
        raise ShapeError(f"split: size must be positive, got {size}")
    return [min(size, whole - at) for at in range(0, whole, size)]


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join Tensors along an axis.

    Args:
        tensors: Tensors on one device, of equal sizes except along `dim`. The result has the widest of their dtypes.
        dim: The axis, from the end if negative.

    Returns:
        A Tensor whose size along `dim` is the sum of theirs.

    Raises:
        ShapeError: the shapes do not fit.
    """
    device = device_of("cat", list(tensors))
    axis = axis_of("cat", dim, tensors[0].ndim)
    first = tensors[0]
    for x in tensors[1:]:
        rest = [n for a, n in enumerate(x.shape) if a != axis]
        if x.ndim != first.ndim or rest != [n for a, n in enumerate(first.shape) if a != axis]:
            raise ShapeError(f"cat: shapes must agree but for axis {axis}, got {list(first.shape)} and {list(x.shape)}")
    sizes, dtype = [x.shape[axis] for x in tensors], joined_dtype([x.dtype for x in tensors])
    shape = tuple(sum(sizes) if a == axis else n for a, n in enumerate(first.shape))
    strides = row_major(shape)
    starts = [sum(sizes[:i]) * strides[axis] for i in range(len(sizes))]
    whole = device.empty(shape, dtype)
    for x, start in zip(tensors, starts):
        x.lazy().write(whole, (strides, start))
    result = Tensor(whole, device)
    if is_recording() and any(x.requires_grad for x in tensors):
        parts = [(x.shape, x.dtype) for x in tensors]

        def backward(dy: Any) -> list[Lazy]:
            given = lazy_of(dy, device)
            given.array()
            return [given.viewed(part, strides, at).astype(of) for (part, of), at in zip(parts, starts)]

        record("cat", [result], [edge_of(x) for x in tensors], backward)
    return result


@implements_method("rotated")
def rotated(x: Tensor, shift: int, axis: int) -> Tensor:
    """Return x rotated by `shift` along an axis."""
    last = shift % x.shape[axis]
    parts = split(x, [x.shape[axis] - last, last], axis) if last else [x]
    return cat(parts[::-1], axis)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join Tensors of one shape along a new axis.

    Args:
        tensors: Tensors on one device, of one shape.
        dim: Position of the new axis, from the end if negative.

    Returns:
        A Tensor with one more axis, whose size is the number of Tensors.

    Raises:
        ShapeError: the shapes differ.
    """
    return cat([unsqueeze(x, dim) for x in tensors], dim)
