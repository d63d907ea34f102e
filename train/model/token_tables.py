"""Rotary tables of a batch, for embeddings that depend on how long a sequence is (dynamic, longrope).

Each sequence has the angles of its own length: what else is in the batch, or how long a table the model has, changes no
number. Of a text that grows token by token the model's own tables do it (`rope_scaling.rope_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.rope_scaling import RopeConfig, depends_on_length, rope_rows


@dataclass(frozen=True)
class TokenTables:
    """cos and sin float32 [N, D / 2] of each token of a batch, of layers and of those with a window. rows int32 [N]:
    0, 1, 2, ..., which stands in the place of positions."""

    config: ModelConfig
    layers: tuple[Array, Array]
    windows: tuple[Array, Array]
    rows: Array

    @classmethod
    def empty(cls, config: ModelConfig, tokens: int, longest: int, device: Device) -> TokenTables | None:
        """For `tokens` tokens, to be written to; None where no sequence of up to `longest` tokens needs any."""
        ropes = _ropes(config)
        if not any(depends_on_length(rope, longest) for rope in ropes):
            return None
        pairs = [(device.zeros(shape), device.zeros(shape)) for shape in ((tokens, r.head_dim // 2) for r in ropes)]
        return cls(config, pairs[0], pairs[-1], device.upload(np.arange(tokens, dtype=np.int32)))

    def write(self, device: Device, positions: np.ndarray, doc_start: np.ndarray) -> None:
        """positions, doc_start: int32 [B, T] of the batch."""
        lengths = sequence_lengths(positions, doc_start).reshape(-1)
        for rope, pair in zip(_ropes(self.config), (self.layers, self.windows)):
            for array, rows in zip(pair, rope_rows(rope, positions.reshape(-1), lengths)):
                device.write(array, rows)


def _ropes(config: ModelConfig) -> list[RopeConfig]:
    """Rotary tables of all layers, and of sliding layers that have their own."""
    return [config.rope] if config.local_rope in (None, config.rope) else [config.rope, config.local_rope]


def sequence_lengths(positions: np.ndarray, doc_start: np.ndarray) -> np.ndarray:
    """int32 [B, T]: the tokens of the sequence that each token belongs to."""
    rows = np.arange(len(positions))[:, None]
    longest = np.zeros_like(positions)
    np.maximum.at(longest, (rows, doc_start), positions + 1)
    values: np.ndarray = longest[rows, doc_start]
    return values
