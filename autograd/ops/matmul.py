"""Matrix multiplication with the semantics of NumPy and PyTorch. Transposed operands are not copied."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from wgrad.autograd.lazy import Lazy, broadcast, joined_dtype, view_of
from wgrad.autograd.ops.arithmetic import device_of, operand_of
from wgrad.autograd.ops.movement import expand
from wgrad.autograd.tensor import Node, Tensor, edge_of, is_recording
from wgrad.autograd.tensor_methods import implements_method
from wgrad.device.contract import Array, Device
from wgrad.device.errors import ShapeError


class _Matrix(NamedTuple):
    """A matrix [(B,) M, K], stored as [(B,) K, M] if transposed."""

    array: Array
    transposed: bool


@implements_method("matmul")
def matmul(a: Any, b: Any) -> Tensor:
    """Return a @ b: [..., M, K] times [..., K, N] with leading axes broadcast; [K] is a row or a column."""
    tensors = [x for x in (a, b) if isinstance(x, Tensor)]
    device = device_of("matmul", tensors)
    x, y = (v if isinstance(v, Tensor) else Tensor(_lazy(v, tensors[0]), device) for v in (a, b))
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        raise ShapeError(
            f"matmul: the last axis of {list(x.shape)} must be as long as the "
            f"{'second-to-last' if y.ndim > 1 else 'only'} axis of {list(y.shape)}; transpose one"
        )
    shape = (*x.shape[:-1], *((*y.shape[:-2], y.shape[-1]) if y.ndim > 1 else ()))
    if y.ndim == 1:
        return matmul(x.reshape(1, -1) if x.ndim == 1 else x, y.reshape(-1, 1)).reshape(shape)
    if x.ndim == 1:
        return matmul(x.reshape(1, -1), y).reshape(*y.shape[:-2], y.shape[-1])
    if y.ndim == 2:
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        made = _product(rows, y)
        return made if x.ndim == 2 else made.reshape(*x.shape[:-1], y.shape[-1])
    batch = broadcast("matmul", x.shape[:-2], y.shape[:-2])
    x, y = (_batched(v, batch) for v in (x, y))
    return _product(x, y).reshape(*batch, x.shape[-2], y.shape[-1])


def _lazy(value: Any, beside: Tensor) -> Lazy:
    operand = operand_of("matmul", value, beside)
    if not isinstance(operand, Lazy):
        raise ShapeError("matmul: an operand is a number; use * to scale")
    return operand


def _batched(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return x [..., M, K] as [B, M, K], expanded to the batch axes."""
    if x.shape[:-2] != batch:
        x = expand(x, (*batch, *x.shape[-2:]))
    if len(batch) == 1:
        return x
    return x.reshape(math.prod(batch), *x.shape[-2:])


def _product(x: Tensor, y: Tensor) -> Tensor:
    device = x.device
    a, b = _matrix(x.lazy(), device), _matrix(y.lazy(), device)
    dtype = None if x.dtype == y.dtype else joined_dtype([x.dtype, y.dtype])
    out = device.gemm(a.array, b.array, trans_a=a.transposed, trans_b=b.transposed, dtype=dtype)
    result = Tensor(out, device)
    if is_recording() and (x.requires_grad or y.requires_grad):
        edges = [edge_of(x), edge_of(y)]

        def backward(dy: Array) -> list[Any]:
            da = db = None
            if edges[0] is not None:
                da = _gradient(device, _Matrix(dy, False), _Matrix(b.array, not b.transposed), a, edges[0])
            if edges[1] is not None:
                db = _gradient(device, _Matrix(a.array, not a.transposed), _Matrix(dy, False), b, edges[1])
            return [da, db]

        saved = [of.array for of, edge in ((a, edges[1]), (b, edges[0])) if edge is not None]
        node = Node("matmul", device, backward, edges, [out], saved=saved)
        result.requires_grad, result.node = True, node
    return result


def _gradient(device: Device, left: _Matrix, right: _Matrix, of: _Matrix, edge: Any) -> Any:
    """Return left @ right, the gradient of operand `of`, in its layout; None if added to the leaf's gradient buffer."""
    if of.transposed:  # (left right)^T = right^T left^T
        made = device.gemm(
            right.array, left.array, trans_a=not right.transposed, trans_b=not left.transposed, dtype=of.array.dtype
        )
        lazy = view_of(made, device)
        rank = len(lazy.shape)
        return lazy.permuted([*range(rank - 2), rank - 1, rank - 2])
    flags = {"trans_a": left.transposed, "trans_b": right.transposed}
    if isinstance(edge, Tensor) and edge.has_grad_buffer:
        device.gemm(left.array, right.array, **flags, out=edge.gradient, accumulate=True)
        return None
    return device.gemm(left.array, right.array, **flags, dtype=of.array.dtype)


def _matrix(lazy: Lazy, device: Device) -> _Matrix:
    if lazy.is_view:
        array, strides, offset = lazy.detail
        *front, rows, columns = lazy.shape
        wanted = (*((rows * columns,) if front else ()), 1, rows)
        if strides == wanted and rows > 1 and columns > 1 and offset % 64 == 0:
            return _Matrix(device.view(array, (*front, columns, rows), offset), True)
    return _Matrix(lazy.array(), False)
