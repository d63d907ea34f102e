"""Mamba-1 instead of attention: a short convolution, a selective scan, and a gate.

    x, z = in_proj(u);  x = silu(conv(x) + bias);  r, B, C = x_proj(x), in some families normed
    output = selective_scan(x, dt_proj(r), B, C, A_log, D) silu(z)

Sources: Gu and Dao, Mamba (arXiv 2312.00752); Jamba, FalconMamba and Mamba in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.mamba_sizes import Mamba1


def mamba1(
    c: Mamba1,
    weights: Mapping[str, Any],
    prefix: str,
    project: Callable[..., Tensor],
    eps: float,
    *,
    doc_start: Array,
    cache_len: Array,
    cache: KVCache | None,
    layer: int,
    ones: Callable[[int], Array],
) -> Tensor:
    """Return the result [N, C] before the output projection. The arguments are those of `delta_net`."""
    x, z = project(prefix + c.in_proj).split(c.inner, 1)
    device, (rows, tokens) = x.device, doc_start.shape

    def weight(name: str) -> Tensor:
        found = weights[f"{prefix}{c.module}.{name}"]
        return found if isinstance(found, Tensor) else Tensor(found, device)

    x, state = x.reshape(rows, tokens, c.inner), None
    if cache is not None:
        x, state = cache.with_history(layer, x), cache.state(layer, device)
    taps = weight("conv1d.weight").reshape(c.inner, c.width)
    x = F.short_conv(x, taps, doc_start, cache_len, silu=not c.conv_bias)
    x = F.silu(F.bias(x, weight("conv1d.bias"))) if c.conv_bias else x
    steps, *parts = project(prefix + c.x_proj, x=x.reshape(rows * tokens, c.inner)).split(_sizes(c), 1)
    if c.norms_of_parts:
        normed = []
        for name, part in zip(("dt", "b", "c"), (steps, *parts)):
            of_norm = weight(f"{name}_layernorm.weight") if c.norm_weights else ones(part.shape[1])
            normed.append(F.rms_norm(part, of_norm, c.norm_eps or eps))
        steps, *parts = normed
    bc = parts[0] if len(parts) == 1 else F.cat(parts, 1)
    # The scan adds the bias in float32: errors of time steps add up over the sequence.
    dt = project(prefix + c.dt_proj, x=steps, biased=False).reshape(rows, tokens, c.inner)
    columns = [weight("A_log"), *(weight(name).reshape(c.inner, 1) for name in ("D", "dt_proj.bias"))]
    bc = bc.reshape(rows, tokens, 2 * c.state_dim)
    y = F.selective_scan(x, dt, bc, F.cat(columns, 1), doc_start, cache_len, state=state)
    if cache is not None:
        cache.keep_state(layer, state, device)
    return F.swiglu(z, y.reshape(rows * tokens, c.inner))


def _sizes(c: Mamba1) -> tuple[int, ...]:
    """Return the sizes of the parts of x_proj's output: time steps, and B and C, in one if they are not normed."""
    return (c.rank, c.state_dim, c.state_dim) if c.norms_of_parts else (c.rank, 2 * c.state_dim)
