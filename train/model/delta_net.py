"""Gated DeltaNet, a replacement of attention: a short convolution, the gated delta rule, and a gated norm.

    q, k, v = silu(conv(x Wqkv));  g = -exp(A_log) softplus(x Wa + dt_bias);  beta = sigmoid(x Wb)
    output = norm(delta_rule(q, k, v, g, beta)) silu(x Wz)

Sources: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464); Qwen3-Next, Qwen3.5 and OLMo Hybrid in
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.linear_attention import PROJECTIONS, LinearAttention

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
    ones: Callable[[int], Array],
) -> Tensor:
    """Return [N, H V], before the output projection.

    Args:
        c: Sizes.
        weights: Weights of the model.
        prefix: Prefix of the layer's weights.
        project: Returns a projection's output for the layer's input, by its path.
        eps: Epsilon of the norm, if `c` has none.
        doc_start: Start of each token's document, int32 [B, T].
        cache_len: Tokens in the cache, int32 [1].
        cache: Cache with the state; None: no cache.
        layer: Index of the layer.
        ones: Returns that many ones in float32.
    """
    qkv, z, b, a = _projected(c, [project(f"{prefix}linear_attn.{part}") for part in PROJECTIONS[c.projected]])
    device, (rows, tokens) = qkv.device, doc_start.shape

    def weight(name: str, *shape: int) -> Tensor:
        found = weights[f"{prefix}{name}"]
        found = found if isinstance(found, Tensor) else Tensor(found, device)
        return found.reshape(*shape) if shape else found

    # Always in float32: they add up over the sequence.
    decay = F.exp(weight("linear_attn.A_log")) * F.softplus(a.to(np.float32) + weight("linear_attn.dt_bias"))
    beta = F.sigmoid(b.to(np.float32))
    beta = beta if c.beta_scale == 1 else beta * c.beta_scale
    g, beta = (x.reshape(rows, tokens, c.heads) for x in (-decay, beta))
    x, state = qkv.reshape(rows, tokens, c.channels), None
    if cache is not None:
        x, state = cache.with_history(layer, x), cache.state(layer, device)
    x = F.short_conv(x, weight("linear_attn.conv1d.weight", c.channels, c.width), doc_start, cache_len)
    y = F.delta_rule(x, g, beta, doc_start, cache_len, key_heads=c.key_heads, key_dim=c.key_dim, state=state)
    if cache is not None:
        cache.keep_state(layer, state, device)
    y = F.rms_norm(y.reshape(-1, c.value_dim), weight(f"{c.norm}.weight"), c.norm_eps or eps)
    return F.swiglu(z, y.reshape(rows * tokens, c.value_size))


def _projected(c: LinearAttention, parts: list[Tensor]) -> list[Tensor]:
    """Return q, k and v as one, z, b, and a. parts: outputs of the projections."""
    if c.projected == "joined":
        return parts
    if c.projected == "apart":
        q, k, v, *others = parts
        return [F.cat((q, k, v), 1), *others]
    (joined, both), values = parts, c.heads // c.key_heads * c.value_dim
    tokens = joined.shape[0]
    q, k, v, z = joined.reshape(tokens, c.key_heads, -1).split((c.key_dim, c.key_dim, values, values), 2)
    b, a = both.reshape(tokens, c.key_heads, -1).split(c.heads // c.key_heads, 2)
    q, k, v, z, b, a = (x.reshape(tokens, -1) for x in (q, k, v, z, b, a))
    return [F.cat((q, k, v), 1), z, b, a]


def gated(x: Tensor, gate: Tensor, by_softplus: bool = False) -> Tensor:
    """Return x sigmoid(gate), or x softplus(gate), in x's dtype."""
    return (x * (F.softplus(gate) if by_softplus else F.sigmoid(gate))).to(x.dtype)


def split_gate(x: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Split [N, heads 2 width] into the queries and the output gates, each [N, heads width]."""
    q, gate = x.reshape(x.shape[0], heads, 2, width).split(1, 2)
    return q.reshape(x.shape[0], heads * width), gate.reshape(x.shape[0], heads * width)
