"""Inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.model.token_tables import TokenTables


class Computes(Protocol):
    """A `Model`, as far as inputs are made for it."""

    device: Device

    def token_tables(self, tokens: int) -> TokenTables | None: ...


@dataclass
class Inputs:
    """Inputs of a forward, on the device: ids, positions int32 [B * T], doc_start int32 [B, T], cache_len int32 [1],
    and for a loss targets int32 [B * T]. seed uint32 [2] switches dropout on. tables: as `Model.token_tables` makes
    them, of whole sequences. adapters: of a model with several, which part of them each token has (adapter_mix.py)."""

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
        """Inputs of a whole forward with targets, to be filled."""
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
