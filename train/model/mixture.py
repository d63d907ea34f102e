"""Forward of a mixture of experts, which some layers have instead of an MLP.

Sources: Shazeer et al. (2017), Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.clamped_swiglu import clamped_swiglu
from wgrad.autograd.ops.routing import Groups, group
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.activations import GATED, PLAIN
from wgrad.train.model.balance import Balance
from wgrad.train.model.experts import DOWN, Experts
from wgrad.train.model.lora import Adapter
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.router import choose


def mixture(
    config: ModelConfig,
    weights: Mapping[str, Any],
    adapter: Adapter | None,
    prefix: str,
    y: Tensor,
    h: Tensor | None,
    projection: Callable[[str, Tensor], Tensor],
    one: Array,
    balance: Balance | None = None,
    routed: Tensor | None = None,
    group_by: Callable[[Tensor, int], Groups] | None = None,
) -> Tensor:
    """Return float32 [N, C]: h, if any, plus the weighted outputs of each token's experts.

    Args:
        config: Configuration of the model.
        weights: Weights of the model.
        adapter: Adapter of the run, if any.
        prefix: Prefix of the layer's weights.
        y: Input of the experts, [N, C].
        h: Residual stream, [N, C].
        projection: Applies a module's projection to its input.
        one: float32 [1] with the value 1.
        balance: Load-balancing loss that gets the router's logits and choices.
        routed: Input of the router, if not y.
        group_by: Groups the rows of chosen experts in the order in which `weights` has them, given their numbers and
            the number of experts; None: by their numbers.
    """
    experts, scale = config.experts, 1.0 if h is None else config.residual_scale
    assert experts is not None
    shares, ids = _route(config, experts, weights, prefix, y if routed is None else routed, balance, routed is not None)
    groups = group(ids, experts.count, y.device) if group_by is None else group_by(ids, experts.count)
    unit = Tensor(one, y.device).reshape(1, 1)

    def linear(part: str, x: Tensor, gather: bool = False) -> Tensor:
        module = f"{prefix}{experts.module}.{part}"
        bias = bias_of_rows(module) if experts.biased else None
        out = F.grouped_linear(x, weights[module], groups, gather=gather, add=bias, dtype=y.dtype)
        lora = None if adapter is None else adapter.modules.get(module)
        if lora is None:
            return out
        u = F.grouped_linear(x, lora.a, groups, gather=gather, alpha=lora.scaling, dtype=np.float32)
        return F.grouped_linear(u, lora.b, groups, add=out, dtype=y.dtype)

    def bias_of_rows(module: str) -> Tensor:
        """Return the bias of each row's expert, by a grouped GEMM whose inner size is 1."""
        bias = weights[f"{module}_bias"]
        column = (bias if isinstance(bias, Tensor) else Tensor(bias, y.device)).reshape(*bias.shape, 1)
        return F.grouped_linear(unit, column, groups, gather=True, dtype=y.dtype)

    read, (into, back) = y, experts.latent_projections
    if experts.latent_width:
        read = projection(prefix + into, y)
    if experts.scales_input:
        read, shares = (y * shares).to(y.dtype), unit.expand(y.shape[0], 1)
    down = linear(DOWN, _activated(config, experts, linear(experts.first, read, gather=True)))
    if experts.shared_width:
        shared = _shared_expert(config, experts, weights, prefix, y, projection, scale)
        h = shared if h is None else F.add(h, shared)
    if experts.latent_width:
        latents = F.combine(down, shares, groups, dtype=np.float32)
        found = F.cast(projection(prefix + back, F.cast(latents, y.dtype)), np.float32)
    elif scale == 1:
        return F.combine(down, shares, groups, residual=h, dtype=np.float32)
    else:
        found = F.combine(down, shares, groups, dtype=np.float32)
    return found if h is None else F.add(h, found if scale == 1 else F.scale(found, scale))


def _route(
    config: ModelConfig,
    experts: Experts,
    weights: Mapping[str, Any],
    prefix: str,
    x: Tensor,
    balance: Balance | None,
    scaled: bool,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        x: Input of the router, [N, C].
        balance: Load-balancing loss that gets the router's logits and choices.
        scaled: Whether logits are divided by sqrt(hidden_size).

    Returns:
        The shares of the chosen experts, float32 [N, k], and their numbers, int32 [N, k].
    """
    router = f"{prefix}{experts.router}"
    logits = F.linear(x, weights[f"{router}.weight"], bias=weights.get(f"{router}.bias"), dtype=np.float32)
    logits = F.scale(logits, config.hidden_size**-0.5) if scaled else logits
    logits = logits if balance is None else balance.through(logits)
    correction = weights[prefix + experts.correction] if experts.correction else None
    shares, ids = choose(experts, logits, correction)
    if balance is not None:  # as in transformers, which does not count by the corrected scores
        balance.count(logits, F.route(logits, experts.chosen, False)[1] if experts.correction else ids)
    if experts.share_scales:
        shares = shares * _of_chosen(weights[prefix + experts.share_scales], ids)
    return shares, ids


def _activated(config: ModelConfig, experts: Experts, both: Tensor) -> Tensor:
    """Apply the experts' activation. both: output of their first projection, gate and up if they are gated."""
    if experts.interleaved:
        return clamped_swiglu(both, experts.alpha, experts.limit)
    return (GATED if experts.gated else PLAIN)[config.hidden_act](both)


def _shared_expert(
    config: ModelConfig,
    experts: Experts,
    weights: Mapping[str, Any],
    prefix: str,
    y: Tensor,
    projection: Callable[[str, Tensor], Tensor],
    scale: float,
) -> Tensor:
    """Return the output of the expert that all tokens use, float32 [N, C]. scale: of the residual stream."""
    *first, last = (f"{prefix}{module}" for module in experts.shared_shapes(config.hidden_size))
    inner = (GATED if experts.gated else PLAIN)[config.hidden_act](*(projection(module, y) for module in first))
    shared = F.cast(projection(last, inner), np.float32)
    if experts.shared_gate:
        gate = F.linear(y, weights[f"{prefix}{experts.shared_gate}.weight"], dtype=np.float32)
        shared = shared * F.sigmoid(gate)
    factor = experts.shared_scale * scale
    return shared if factor == 1 else F.scale(shared, factor)


def _of_chosen(scales: Any, ids: Tensor) -> Tensor:
    """Return the scales of each token's experts, float32 [T, k]. scales: [E]. ids: int32 [T, k]."""
    device, column = ids.device, (scales.shape[0], 1)
    table = scales.reshape(*column) if isinstance(scales, Tensor) else device.view(scales, column)
    flat = device.view(ids.data, (ids.shape[0] * ids.shape[1],))
    return F.embedding(table, flat, device=device).reshape(*ids.shape)
