"""Inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.model.token_tables import TokenTables


class Computes(Protocol):
    """The part of `Model` that inputs need."""

    device: Device

    def token_tables(self, tokens: int) -> TokenTables | None: ...


@dataclass
class Inputs:
    """Inputs of a forward, on the device.

    Attributes:
        ids, positions: int32 [B * T].
        doc_start: Index of the first key that each token attends to, which begins its document, int32 [B, T].
        cache_len: Number of filled places of the KV cache, int32 [1].
        targets: int32 [B * T], only for a loss.
        seed: uint32 [2]; if given, dropout is applied.
        tables: Result of `Model.token_tables`, for whole sequences.
        adapters: For a model with several adapters, the share of each in each token (adapter_mix.py).
    """

    ids: Array
    positions: Array
    doc_start: Array
    cache_len: Array
    targets: Array | None = None
    seed: Array | None = None
    tables: TokenTables | None = None
    adapters: Mapping[tuple[tuple[int, int], ...], Array] = field(default_factory=dict)

    @classmethod
    def empty(cls, model: Computes, batch: int, tokens: int) -> Inputs:
        """Return zeros as inputs of a forward over whole sequences with targets, to be overwritten."""
        device = model.device
        flat = (batch * tokens,)
        return cls(
            ids=device.upload(np.zeros(flat, np.int32)),
            positions=device.upload(np.zeros(flat, np.int32)),
            doc_start=device.upload(np.zeros((batch, tokens), np.int32)),
            cache_len=device.upload(np.zeros(1, np.int32)),
            targets=device.upload(np.zeros(flat, np.int32)),
            tables=model.token_tables(batch * tokens),
        )

    @property
    def batch(self) -> int:
        result: int = self.doc_start.shape[0]
        return result

    @property
    def tokens(self) -> int:
        result: int = self.doc_start.shape[1]
        return result
