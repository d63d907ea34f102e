"""Per-layer embeddings: each layer has its own embedding of a token.

    inputs = (norm(x Wp / sqrt(C)) + sqrt(P) table[ids]) / sqrt(2), with P elements for each layer
    h += norm(Wo (act(h Wg) inputs))

Source: Gemma 3n and 4 in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device

TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection"
NORM = "model.per_layer_projection_norm"
GATE, OUT, OUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


@dataclass(frozen=True)
class PerLayer:
    """Sizes of per-layer embeddings.

    Attributes:
        vocabulary: Rows of the table.
        width: Elements of a token for each layer.
        words: Size of the model's vocabulary.
    """

    vocabulary: int
    width: int
    words: int

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within the layer."""
        return {GATE: (self.width, hidden), OUT: (hidden, self.width)}

    def _within(self, ids: Array, device: Device) -> Array:
        """Return the table's row of each token: 0 for tokens that it does not have, as in transformers."""
        if self.vocabulary >= self.words:
            return ids
        own = Tensor(ids, device)
        return F.where(own < self.vocabulary, own, 0).data

    def inputs(self, hidden: int, projected: Tensor, table: Any, norm: Any, eps: float, ids: Array) -> list[Tensor]:
        """Return the inputs [N, P] of each layer, in the dtype of `projected`.

        Args:
            hidden: Width of the embeddings.
            projected: Projection of the embeddings for all layers, [N, layers P].
            table: Embeddings of tokens for all layers, [V, layers P].
            norm: Weight of the norm, [P].
            ids: Tokens, int32 [N].
        """
        dtype, (rows, width) = projected.dtype, projected.shape
        scaled = F.scale(F.cast(projected, np.float32), hidden**-0.5).reshape(-1, self.width)
        context = F.rms_norm(scaled, norm, eps).reshape(rows, width)
        token = F.embedding(table, self._within(ids, projected.device), dtype=np.float32, device=projected.device)
        both = ((context + token * math.sqrt(self.width)) * math.sqrt(0.5)).to(dtype)
        parts: list[Tensor] = list(both.split(self.width, 1))
        for part in parts:  # copies each part to its own array, so that the array of all layers can be freed
            part.data  # noqa: B018
        return parts
