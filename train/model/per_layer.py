"""Per-layer embeddings: each layer reads an embedding of the token that is its own.

    inputs = (norm(x Wp / sqrt(C)) + sqrt(P) table[ids]) / sqrt(2), of every layer P numbers
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
    """vocabulary: rows of the table. width: numbers of a token for each layer. words: tokens that the model has."""

    vocabulary: int
    width: int
    words: int

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shape [out, in] of a layer's, by their path within the layer."""
        return {GATE: (self.width, hidden), OUT: (hidden, self.width)}

    def _within(self, ids: Array, device: Device) -> Array:
        """Ids of the table's rows; 0 in place of tokens that it does not have, as in transformers."""
        if self.vocabulary >= self.words:
            return ids
        own = Tensor(ids, device)
        return F.where(own < self.vocabulary, own, 0).data

    def inputs(self, hidden: int, projected: Tensor, table: Any, norm: Any, eps: float, ids: Array) -> list[Tensor]:
        """The inputs [N, P] of each layer, in the dtype of `projected`.

        Args:
            hidden: the width of the embeddings.
            projected: [N, layers P], of the embeddings by the projection of all layers.
            table: [V, layers P], with a row for each token.
            norm: weight [P] of the norm.
            ids: int32 [N].
        """
        dtype, (rows, width) = projected.dtype, projected.shape
        scaled = F.scale(F.cast(projected, np.float32), hidden**-0.5).reshape(-1, self.width)
        context = F.rms_norm(scaled, norm, eps).reshape(rows, width)
        token = F.embedding(table, self._within(ids, projected.device), dtype=np.float32, device=projected.device)
        both = ((context + token * math.sqrt(self.width)) * math.sqrt(0.5)).to(dtype)
        parts: list[Tensor] = list(both.split(self.width, 1))
        for part in parts:  # each an array of its own, without those of the others
            part.data  # noqa: B018
        return parts
