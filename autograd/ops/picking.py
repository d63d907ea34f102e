"""Indexing of Tensors by int32 arrays, and the elements on one side of a diagonal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.host_arrays import to_device
from wgrad.autograd.lazy import EXACT, apply, index
from wgrad.autograd.ops.arithmetic import where
from wgrad.autograd.ops.embedding import embedding
from wgrad.autograd.tensor import Tensor
from wgrad.autograd.tensor_methods import axis_of, implements_method
from wgrad.device.errors import ShapeError


def picked(x: Tensor, indices: Sequence[Any]) -> Tensor:
    """Return x[indices], where one index is an array, or all of them are arrays for the first axes."""
    at = [axis for axis, i in enumerate(indices) if isinstance(i, Tensor | np.ndarray | list)]
    if len(at) == 1:
        return _along(x, indices, at[0])
    if at != list(range(len(indices))) or len(at) > x.ndim:
        raise ShapeError(
            f"several index arrays must be the only indices, at most one for each of {x.ndim} axes, got {len(indices)}"
        )
    sizes = x.shape[: len(at)]
    if math.prod(sizes) > EXACT:
        raise ShapeError(
            f"the axes of several index arrays must have at most {EXACT} elements, got {list(sizes)}; use one array"
        )
    places: Any = 0
    for i, n in zip(indices, sizes):
        places = places * n + (_ids(i) if isinstance(i, Tensor) else _counted(np.asarray(i), n))
    return _rows(x.reshape(math.prod(sizes), *x.shape[len(at) :]), places)


def _along(x: Tensor, indices: Sequence[Any], at: int) -> Tensor:
    """Return x[indices], where index number `at` is an array: apply the others, then pick rows along that axis."""
    before = sum(i is not None for i in indices[:at])
    if any(i is Ellipsis for i in indices[:at]):
        before = x.ndim - sum(i is not None for i in indices[at:])
    rest = x[(*indices[:at], slice(None), *indices[at + 1 :])] if len(indices) > 1 else x
    axis = sum(not isinstance(i, int | np.integer) for i in indices[:at] if i is not Ellipsis)
    if any(i is Ellipsis for i in indices[:at]):
        axis += before - sum(i is not None and i is not Ellipsis for i in indices[:at])
    order = [axis, *(a for a in range(rest.ndim) if a != axis)]
    made = _rows(rest.permute(order) if axis else rest, indices[at])
    new = made.ndim - rest.ndim + 1
    return made.permute(*range(new, new + axis), *range(new), *range(new + axis, made.ndim)) if axis else made


def _ids(ids: Tensor) -> Tensor:
    if ids.dtype == np.uint32:
        raise ShapeError(
            "an index must be int32, got a mask of uint32, whose number of elements the host does not know; use "
            "wgrad.where(mask, x, 0), or x.numpy()[mask.numpy() != 0]"
        )
    if ids.dtype != np.int32:
        raise ShapeError(f"an index must be int32, got {ids.dtype}; convert it with .to(np.int32)")
    return ids


def _counted(ids: np.ndarray, n: int) -> np.ndarray:
    """Return indices of the host as int32 from 0 on; negative ones count from the end of the axis of n."""
    if ids.dtype.kind not in "iu":
        raise ShapeError(
            f"an index must be of whole numbers, got {ids.dtype}; for a mask use wgrad.where(mask, x, 0) or np.nonzero"
        )
    if ids.size and (ids.min() < -n or ids.max() >= n):
        raise ShapeError(f"an index must be from {-n} to {n - 1} for an axis of {n}, got {ids.min()} to {ids.max()}")
    counted: np.ndarray = np.where(ids < 0, ids + n, ids).astype(np.int32)
    return counted


def _rows(table: Tensor, ids: Any) -> Tensor:
    """Return table[ids] for ids of any shape."""
    n, device = table.shape[0], table.device
    if isinstance(ids, Tensor):
        rows = _ids(ids)
    else:
        rows = Tensor(to_device("index", _counted(np.asarray(ids), n), device), device)
    width = table.shape[1:]
    flat = table if table.ndim == 2 else table.reshape(n, math.prod(width))
    numbers = device.view(rows.data, (rows.size,))
    if flat.dtype.kind in "iu":  # a lookup is of floats, which hold what a slice of whole numbers keeps too
        return embedding(flat.float(), numbers).to(table.dtype).reshape(*rows.shape, *width)
    return embedding(flat, numbers, dtype=table.dtype).reshape(*rows.shape, *width)


@implements_method("reversed")
def reversed(x: Tensor, axis: int) -> Tensor:
    """Return x with the order along an axis reversed, by indices that the device makes."""
    n = x.shape[axis]
    if n > EXACT:
        return x[(slice(None),) * axis + (np.arange(n)[::-1],)]
    places = apply("sub", n - 1.0, index((n,), 0, x.device), dtype=np.dtype(np.int32))
    return x[(slice(None),) * axis + (Tensor(places, x.device),)]


@implements_method("gather")
def gather(x: Tensor, dim: int, places: Any) -> Tensor:
    """Return x's values at the indices places [..., K, ...] along an axis; the other axes are as in x."""
    axis = axis_of("gather", dim, x.ndim)
    if not isinstance(places, Tensor):
        numbers, n = np.asarray(places), x.shape[axis]
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < n:
            raise ShapeError(f"gather: index must be from 0 to {n - 1}, got {numbers.min()} to {numbers.max()}")
        places = Tensor(to_device("gather", numbers, x.device), x.device)
    given = _ids(places)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    if given.ndim != x.ndim or [n for a, n in enumerate(given.shape) if a != axis] != rest:
        raise ShapeError(
            f"gather: index must have the shape of x {list(x.shape)} but for axis {axis}, got {list(given.shape)}"
        )
    over, wanted = x.unsqueeze(axis), given.unsqueeze(axis + 1)
    shape = (*over.shape[:axis], given.shape[axis], *over.shape[axis + 1 :])
    chosen = Tensor(apply("eq", index(shape, axis + 1, x.device), wanted.lazy()), x.device)
    return where(chosen, over, 0).sum(axis + 1)


@implements_method("tril")
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x [..., R, C] with zeros above a diagonal."""
    return _side("tril", "le", x, diagonal)


@implements_method("triu")
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x [..., R, C] with zeros below a diagonal."""
    return _side("triu", "ge", x, diagonal)


def _side(name: str, compare: str, x: Tensor, diagonal: int) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"{name}: x must have at least two axes, got shape {list(x.shape)}")
    row, column = (index(x.shape, x.ndim - back, x.device) for back in (2, 1))
    return where(Tensor(apply(compare, column, row + float(diagonal)), x.device), x, 0)
