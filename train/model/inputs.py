"""Inputs of a forward over whole sequences."""

from __future__ import annotations

import numpy as np

from wgrad.train.model.model import Inputs, Model
from wgrad.train.model.token_tables import TokenTables


def whole_inputs(model: Model, ids: np.ndarray, positions: np.ndarray, doc_start: np.ndarray) -> Inputs:
    """Make the inputs of sequences from their first tokens: int32 [B, T]. No targets."""
    device = model.device
    tables = TokenTables.empty(model.config, positions.size, int(positions.max()) + 1, device)
    if tables is not None:
        tables.write(device, positions, doc_start)
    return Inputs(
        ids=device.upload(ids.reshape(-1)),
        positions=device.upload(positions.reshape(-1)),
        doc_start=device.upload(doc_start),
        cache_len=device.upload(np.zeros(1, np.int32)),
        tables=tables,
    )
