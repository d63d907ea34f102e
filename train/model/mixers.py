"""The layers that replace attention, by the class of their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wgrad.autograd.tensor import Tensor
from wgrad.train.model.delta_net import delta_net
from wgrad.train.model.gated_conv import gated_conv
from wgrad.train.model.linear_attention import GatedConvolution, LinearAttention
from wgrad.train.model.mamba1 import mamba1
from wgrad.train.model.mamba2 import mamba2
from wgrad.train.model.mamba_sizes import Mamba1, Mamba2
from wgrad.train.model.model_config import Mixer

_MIXERS: dict[type, Callable[..., Tensor]] = {
    LinearAttention: delta_net,
    GatedConvolution: gated_conv,
    Mamba1: mamba1,
    Mamba2: mamba2,
}


def mix(c: Mixer, weights: Mapping[str, Any], *args: Any, **options: Any) -> Tensor:
    """Return a layer's output [N, ...], before the output projection. Arguments: as for `delta_net`."""
    return _MIXERS[type(c)](c, weights, *args, **options)
