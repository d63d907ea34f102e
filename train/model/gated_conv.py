"""A gated short convolution, which most layers of LFM2 have instead of attention.

    b, c, x = in_proj(input);  output = c conv(b x)

Source: LFM2 in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.linear_attention import GatedConvolution


def gated_conv(
    c: GatedConvolution,
    weights: Mapping[str, Any],
    prefix: str,
    project: Callable[[str], Tensor],
    eps: float,
    *,
    doc_start: Array,
    cache_len: Array,
    cache: KVCache | None,
    layer: int,
    ones: Callable[[int], Array],
) -> Tensor:
    """Return the result [N, C] before the output projection. The arguments are those of `delta_net`."""
    mixed = project(f"{prefix}conv.in_proj")
    gate, after, x = mixed.split(c.channels, 1)
    rows, tokens = doc_start.shape
    x = (gate * x).reshape(rows, tokens, c.channels)
    if cache is not None:
        x = cache.with_history(layer, x)
    weight = weights[f"{prefix}conv.conv.weight"]
    weight = weight if isinstance(weight, Tensor) else Tensor(weight, mixed.device)
    y = F.short_conv(x, weight.reshape(c.channels, c.width), doc_start, cache_len, silu=False)
    return (after * y.reshape(rows * tokens, c.channels)).to(mixed.dtype)
