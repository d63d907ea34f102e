"""Causal attention of whole sequences, without the arguments that packed batches need."""

from __future__ import annotations

import math
import weakref

import numpy as np

from wgrad.autograd.ops.attention import attention
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device

_zeros: weakref.WeakKeyDictionary[Device, dict[tuple[int, ...], Array]] = weakref.WeakKeyDictionary()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T) v, with each token attending to itself and the tokens before it.

    q, k, v and the result are [B, T, heads, width]. scale: by default 1 / sqrt(width).
    """
    starts, none = (_zeros_of(q.device, shape) for shape in (q.shape[:2], (1,)))
    return attention(q, k, v, starts, none, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def _zeros_of(device: Device, shape: tuple[int, ...]) -> Array:
    """Return int32 zeros, made once per device and shape: documents begin at token 0, and the cache is empty."""
    known = _zeros.setdefault(device, {})
    if shape not in known:
        known[shape] = device.zeros(shape, np.int32)
    return known[shape]
