"""Gated DeltaNet in the place of attention: a short convolution, the gated delta rule, and a gated norm.

    q, k, v = silu(conv(x Wqkv));  g = -exp(A_log) softplus(x Wa + dt_bias);  beta = sigmoid(x Wb)
    output = norm(delta_rule(q, k, v, g, beta)) silu(x Wz)

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464); Qwen3.5 in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.linear_attention import LinearAttention

Project = Callable[[str], Tensor]


def delta_net(
    c: LinearAttention,
    weights: Mapping[str, Any],
    prefix: str,
    project: Project,
    eps: float,
    *,
    doc_start: Array,
    cache_len: Array,
    cache: KVCache | None,
    layer: int,
) -> Tensor:
    """[N, H V], before the output projection. prefix: of the layer's weights. project: from the path of a projection to
    its output for the layer's input."""
    qkv, z, b, a = (project(f"{prefix}linear_attn.in_proj_{part}") for part in ("qkv", "z", "b", "a"))
    device, (rows, tokens) = qkv.device, doc_start.shape

    def weight(name: str, *shape: int) -> Tensor:
        found = weights[f"{prefix}linear_attn.{name}"]
        found = found if isinstance(found, Tensor) else Tensor(found, device)
        return found.reshape(*shape) if shape else found

    # In float32 whatever the compute dtype is: they add up over the sequence.
    decay = F.exp(weight("A_log")) * F.softplus(a.to(np.float32) + weight("dt_bias"))
    g, beta = (x.reshape(rows, tokens, c.heads) for x in (-decay, F.sigmoid(b.to(np.float32))))
    x, state = qkv.reshape(rows, tokens, c.channels), None
    if cache is not None:
        x, state = cache.with_history(layer, x), cache.state(layer, device)
    x = F.short_conv(x, weight("conv1d.weight", c.channels, c.width), doc_start, cache_len)
    y = F.delta_rule(x, g, beta, doc_start, cache_len, key_heads=c.key_heads, key_dim=c.key_dim, state=state)
    if cache is not None:
        cache.keep_state(layer, state, device)
    y = F.rms_norm(y.reshape(-1, c.value_dim), weight("norm.weight"), eps)
    return F.swiglu(z, y.reshape(rows * tokens, c.value_size))


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate), in x's dtype."""
    return (x * F.sigmoid(gate)).to(x.dtype)


def split_gate(x: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """[N, heads 2 width] -> the queries of each head and the gate of its output, each [N, heads width]."""
    q, gate = x.reshape(x.shape[0], heads, 2, width).split(1, 2)
    return q.reshape(x.shape[0], heads * width), gate.reshape(x.shape[0], heads * width)
