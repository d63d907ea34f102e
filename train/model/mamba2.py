"""Mamba-2 instead of attention: a short convolution, a decaying state, and a gated norm.

    z, xBC, dt = in_proj(u);  x, B, C = silu(conv(xBC) + bias);  dt = softplus(dt + dt_bias)
    output = norm(ssd(x, B, C, dt, -exp(A_log) dt, D) silu(z))

Sources: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); Granite 4, Bamba, Falcon-H1 and Nemotron-H in
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
from wgrad.train.model.mamba_sizes import Mamba2


def mamba2(
    c: Mamba2,
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
    """Return the result [N, H P] before the output projection. The arguments are those of `delta_net`."""
    z, xbc, dt = project(prefix + c.in_proj).split((c.inner, c.channels, c.heads), 1)
    device, (rows, tokens) = z.device, doc_start.shape

    def weight(name: str) -> Tensor:
        found = weights[f"{prefix}{c.module}.{name}"]
        return found if isinstance(found, Tensor) else Tensor(found, device)

    of_z, *of_parts, of_dt = c.scales
    z, dt = z if of_z == 1 else F.scale(z, of_z), dt if of_dt == 1 else F.scale(dt, of_dt)
    dt = _time_steps(c, dt, weight)
    g = -F.exp(weight("A_log")) * dt
    x, state = xbc.reshape(rows, tokens, c.channels), None
    if cache is not None:
        x, state = cache.with_history(layer, x), cache.state(layer, device)
    x = _convolved(c, x, of_parts, weight, doc_start, cache_len)
    g, dt = (y.reshape(rows, tokens, c.heads) for y in (g, dt))
    options: dict[str, Any] = {"groups": c.groups, "state_dim": c.state_dim, "state": state}
    y = F.ssd(x, g, dt, weight("D"), doc_start, cache_len, **options).reshape(rows * tokens, c.inner)
    if cache is not None:
        cache.keep_state(layer, state, device)
    if not c.norm:
        return F.swiglu(z, y)
    if c.norm_first:
        return F.swiglu(z, _norm_of_groups(c, y, weight, eps, ones))
    return _norm_of_groups(c, F.swiglu(z, y), weight, eps, ones)


def _time_steps(c: Mamba2, dt: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
    """Return the time steps of tokens and heads, always in float32, since their errors add up over the sequence."""
    dt = F.softplus(dt.to(np.float32) + weight("dt_bias"))
    low, high = c.limits
    dt = dt if low <= 0 else F.maximum(dt, low)
    return dt if high == float("inf") else F.minimum(dt, high)


def _convolved(
    c: Mamba2,
    x: Tensor,
    scales: list[float],
    weight: Callable[[str], Tensor],
    doc_start: Array,
    cache_len: Array,
) -> Tensor:
    """Return silu(conv(x) + bias) for x, B and C side by side. scales: factors of the three."""
    taps = weight("conv1d.weight").reshape(c.channels, c.width)
    if scales != [1.0] * 3:  # scaling the weight scales the convolution's input
        taps = F.cat([part * scale for part, scale in zip(taps.split(c.parts, 0), scales)])
    x = F.short_conv(x, taps, doc_start, cache_len, silu=not c.conv_bias)
    return F.silu(F.bias(x, weight("conv1d.bias"))) if c.conv_bias else x


def _norm_of_groups(
    c: Mamba2, y: Tensor, weight: Callable[[str], Tensor], eps: float, ones: Callable[[int], Array]
) -> Tensor:
    """Normalize each group of a token's numbers by itself."""
    if c.groups == 1:
        return F.rms_norm(y, weight("norm.weight"), eps)
    width = c.inner // c.groups
    parts = F.rms_norm(y.reshape(-1, width), ones(width), eps, dtype=np.float32)
    return (parts.reshape(-1, c.inner) * weight("norm.weight")).to(y.dtype)
