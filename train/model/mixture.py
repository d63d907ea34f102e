"""Forward of a mixture of experts, which some layers have in the place of an MLP.

Sources: Shazeer et al. (2017), Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.routing import group
from wgrad.autograd.tensor import Tensor
from wgrad.train.model.experts import DOWN, GATE_UP
from wgrad.train.model.model_config import ModelConfig

_GATED = {"silu": F.swiglu, "gelu_tanh": F.geglu}


def has_experts(config: ModelConfig, prefix: str) -> bool:
    """Return whether the layer of this prefix has experts."""
    return config.has_experts(int(prefix.split(".")[2]))


def mixture(config: ModelConfig, weights: Mapping[str, Any], prefix: str, y: Tensor, h: Tensor) -> Tensor:
    """y [N, C] -> float32 [N, C]: h plus what the experts of each token make of it, by their weights."""
    experts, scale = config.experts, config.residual_scale
    assert experts is not None
    dtype, module = y.dtype, f"{prefix}{experts.module}."
    logits = F.linear(y, weights[f"{prefix}{experts.router}.weight"], dtype=np.float32)
    shares, ids = F.route(logits, experts.chosen, experts.normalize)
    groups = group(ids, experts.count, y.device)
    both = F.grouped_linear(y, weights[module + GATE_UP], groups, gather=True, dtype=dtype)
    activated = _GATED[config.hidden_act](both, None)
    down = F.grouped_linear(activated, weights[module + DOWN], groups, dtype=dtype)
    found = F.combine(down, shares, groups, residual=h if scale == 1 else None, dtype=np.float32)
    return found if scale == 1 else F.add(h, F.scale(found, scale))
