"""Tables of rotary embeddings by token, for types that depend on a sequence's length (dynamic, longrope).

Each sequence gets the angles for its own length, whatever else is in the batch. Generation uses the model's tables by
position instead (`rope_scaling.rope_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.rope_scaling import RopeConfig, depends_on_length, rope_rows


@dataclass(frozen=True)
class TokenTables:
    """Tables with a row for each token of a batch.

    Attributes:
        layers, windows: cos and sin, float32 [N, D / 2], for layers without and with a window.
        rows: 0, 1, 2, ..., int32 [N], which replaces positions as the index into the tables.
    """

    config: ModelConfig
    layers: tuple[Array, Array]
    windows: tuple[Array, Array]
    rows: Array

    @classmethod
    def empty(cls, config: ModelConfig, tokens: int, longest: int, device: Device) -> TokenTables | None:
        """Allocate tables for `tokens` tokens, or return None if sequences of up to `longest` tokens need none."""
        ropes = _ropes(config)
        if not any(depends_on_length(rope, longest) for rope in ropes):
            return None
        pairs = [(device.zeros(shape), device.zeros(shape)) for shape in ((tokens, r.head_dim // 2) for r in ropes)]
        return cls(config, pairs[0], pairs[-1], device.upload(np.arange(tokens, dtype=np.int32)))

    def write(self, device: Device, positions: np.ndarray, doc_start: np.ndarray) -> None:
        """Fill the tables for a batch. positions, doc_start: int32 [B, T]."""
        lengths = sequence_lengths(positions, doc_start).reshape(-1)
        for rope, pair in zip(_ropes(self.config), (self.layers, self.windows)):
            for array, rows in zip(pair, rope_rows(rope, positions.reshape(-1), lengths)):
                device.write(array, rows)


def _ropes(config: ModelConfig) -> list[RopeConfig]:
    """Return the rotary embeddings of layers, and those of sliding layers if they differ."""
    return [config.rope] if config.local_rope in (None, config.rope) else [config.rope, config.local_rope]


def sequence_lengths(positions: np.ndarray, doc_start: np.ndarray) -> np.ndarray:
    """Return for each token the length of its sequence, int32 [B, T]."""
    rows = np.arange(len(positions))[:, None]
    longest = np.zeros_like(positions)
    np.maximum.at(longest, (rows, doc_start), positions + 1)
    values: np.ndarray = longest[rows, doc_start]
    return values
