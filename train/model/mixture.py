"""Forward of a mixture of experts, which some layers have instead of an MLP.

Sources: Shazeer et al. (2017), Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.clamped_swiglu import clamped_swiglu
from wgrad.autograd.ops.routing import group
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.activations import PLAIN
from wgrad.train.model.balance import Balance
from wgrad.train.model.experts import DOWN
from wgrad.train.model.lora import Adapter
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.router import choose

_GATED = {"silu": F.swiglu, "gelu_tanh": F.geglu}


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
    """
    experts, scale = config.experts, 1.0 if h is None else config.residual_scale
    assert experts is not None

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
        return F.grouped_linear(Tensor(one, y.device).reshape(1, 1), column, groups, gather=True, dtype=y.dtype)

    def activated(both: Tensor) -> Tensor:
        if experts.interleaved:
            return clamped_swiglu(both, experts.alpha, experts.limit)
        return _GATED[config.hidden_act](both, None) if experts.gated else PLAIN[config.hidden_act](both)

    router = f"{prefix}{experts.router}"
    seen = y if routed is None else routed
    logits = F.linear(seen, weights[f"{router}.weight"], bias=weights.get(f"{router}.bias"), dtype=np.float32)
    logits = logits if routed is None else F.scale(logits, config.hidden_size**-0.5)
    logits = logits if balance is None else balance.through(logits)
    correction = weights[prefix + experts.correction] if experts.correction else None
    shares, ids = choose(experts, logits, correction)
    if balance is not None:
        balance.count(logits, ids)
    if experts.share_scales:
        shares = shares * _of_chosen(weights[prefix + experts.share_scales], ids)
    groups = group(ids, experts.count, y.device)
    read = y
    if experts.scales_input:
        read, shares = (y * shares).to(y.dtype), Tensor(one, y.device).reshape(1, 1).expand(y.shape[0], 1)
    down = linear(DOWN, activated(linear(experts.first, read, gather=True)))
    if experts.shared_width:
        *first, last = (f"{prefix}{module}" for module in experts.shared_shapes(config.hidden_size))
        inner = (_GATED if experts.gated else PLAIN)[config.hidden_act](*(projection(module, y) for module in first))
        shared = projection(last, inner)
        shared = F.cast(shared, np.float32)
        if experts.shared_gate:
            gate = F.linear(y, weights[f"{prefix}{experts.shared_gate}.weight"], dtype=np.float32)
            shared = shared * F.sigmoid(gate)
        factor = experts.shared_scale * scale
        shared = shared if factor == 1 else F.scale(shared, factor)
        h = shared if h is None else F.add(h, shared)
    found = F.combine(down, shares, groups, residual=h if scale == 1 else None, dtype=np.float32)
    return found if scale == 1 or h is None else F.add(h, F.scale(found, scale))


def _of_chosen(scales: Any, ids: Tensor) -> Tensor:
    """Return the scales of each token's experts, float32 [T, k]. scales: [E]. ids: int32 [T, k]."""
    device, column = ids.device, (scales.shape[0], 1)
    table = scales.reshape(*column) if isinstance(scales, Tensor) else device.view(scales, column)
    flat = device.view(ids.data, (ids.shape[0] * ids.shape[1],))
    return F.embedding(table, flat, device=device).reshape(*ids.shape)
