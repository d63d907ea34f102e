"""Layers of torch.nn.functional that are matmuls of rearranged arrays: attention, convolution, pooling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.lazy import apply, index
from wgrad.autograd.ops.arithmetic import where
from wgrad.autograd.ops.movement import stack
from wgrad.autograd.ops.torch_functions import dropout, pad
from wgrad.autograd.tensor import Tensor
from wgrad.device.errors import ShapeError


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(query key^T scale) value, whose scores are stored; `causal_attention` stores none.

    Args:
        query: [..., T, D].
        key: [..., S, D].
        value: [..., S, E].
        attn_mask: Broadcast to [..., T, S]. Scores are kept where uint32 or bool is not 0; floats are added to them.
        dropout_p: Probability of dropping a weight.
        is_causal: Let position t see positions up to t alone.
        scale: 1 / sqrt(D) by default.

    Returns:
        [..., T, E].
    """
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        row, column = (index(scores.shape, scores.ndim - back, query.device) for back in (2, 1))
        scores = where(Tensor(apply("le", column, row), query.device), scores, -math.inf)
    if attn_mask is not None:
        floats = np.dtype(attn_mask.dtype).kind in "fV"  # V: bfloat16
        scores = scores + attn_mask if floats else scores.masked_fill(attn_mask == 0, -math.inf)
    weights = scores.softmax(-1)
    return (dropout(weights, dropout_p) if dropout_p else weights) @ value


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0) -> Tensor:
    """Convolve images by one matmul of stacked slices.

    Args:
        x: [N, C, H, W].
        weight: [O, C, kernel height, kernel width].
        bias: [O].
        stride: A number, or one for each axis.
        padding: Zeros around the image: a number, or one for each axis.

    Returns:
        [N, O, (H + 2 padding - kernel height) // stride + 1, ...].
    """
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1] != x.shape[1]:
        raise ShapeError(
            f"conv2d: x must be [N, C, H, W] and weight [O, C, height, width], got {list(x.shape)} and "
            f"{list(weight.shape)}; there are no groups"
        )
    high, wide = _pair(padding)
    kernel = weight.shape[2:]
    seen = _windows("conv2d", pad(x, (wide, wide, high, high)) if high or wide else x, kernel, _pair(stride))
    parts = stack(seen, 2)  # [N, C, kernel, H, W]
    made = weight.flatten(1) @ parts.flatten(3).flatten(1, 2)
    made = made.reshape(x.shape[0], weight.shape[0], *parts.shape[3:])
    return made if bias is None else made + bias.reshape(-1, 1, 1)


def max_pool2d(x: Tensor, kernel_size: Any, stride: Any = None) -> Tensor:
    """Return the largest value of each window of x [N, C, H, W]; `stride` is the window's size by default.

    Equal ones share the gradient, of which PyTorch gives all to the first.
    """
    return _pool("max_pool2d", x, kernel_size, stride).amax(0)


def avg_pool2d(x: Tensor, kernel_size: Any, stride: Any = None) -> Tensor:
    """Return the mean of each window of x [N, C, H, W]; `stride` is the window's size by default."""
    return _pool("avg_pool2d", x, kernel_size, stride).mean(0)


def _pool(name: str, x: Tensor, kernel_size: Any, stride: Any) -> Tensor:
    kernel = _pair(kernel_size)
    return stack(_windows(name, x, kernel, kernel if stride is None else _pair(stride)), 0)


def _windows(name: str, x: Tensor, kernel: tuple[int, ...], stride: tuple[int, int]) -> list[Tensor]:
    """Return for each position of a kernel the elements [..., H, W] that it meets."""
    height, width = ((n - k) // s + 1 for n, k, s in zip(x.shape[-2:], kernel, stride))
    if min(*kernel, *stride) < 1 or min(height, width) < 1:
        raise ShapeError(
            f"{name}: the kernel and stride must be positive and the kernel within the image of {list(x.shape[-2:])}, "
            f"got {list(kernel)} and {list(stride)}"
        )
    down, right = stride
    return [
        x[..., i : i + down * (height - 1) + 1 : down, j : j + right * (width - 1) + 1 : right]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
