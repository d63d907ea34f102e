"""transformers' gated DeltaNet in the dtype of its input, where it casts to float32: token by token, by definition."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def _rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **options: Any) -> tuple[Any, None]:
    import torch

    share, width = value.shape[2] // key.shape[2], key.shape[3]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    q, k = (x.repeat_interleave(share, dim=2) for x in (q * width**-0.5, k))
    state = torch.zeros(*value.shape[:1], *value.shape[2:3], width, value.shape[3], dtype=value.dtype)
    found = []
    for t in range(value.shape[1]):
        state = state * torch.exp(g[:, t])[..., None, None]
        wrong = value[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + k[:, t][..., None] * (beta[:, t][..., None] * wrong)[:, :, None]
        found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(found, 1), None


def _gated_norm(self: Any, hidden_states: Any, gate: Any) -> Any:
    import torch

    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden_states * scale) * torch.nn.functional.silu(gate)


@contextmanager
def exact_delta_net(model: Any) -> Iterator[None]:
    """Use the exact recurrence within the block, where the model has such layers."""
    import torch

    found = next((m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")), None)
    if found is None or next(model.parameters()).dtype != torch.float64:
        yield
        return
    module, plain = sys.modules[type(found).__module__], torch.Tensor.float
    with (
        patch.object(module, "torch_chunk_gated_delta_rule", _rule),
        patch.object(type(getattr(found, "norm", None) or found.o_norm), "forward", _gated_norm),
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else plain(x)),
    ):
        yield
