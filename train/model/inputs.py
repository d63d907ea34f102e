"""Inputs of a forward over whole sequences."""

from __future__ import annotations

import numpy as np

from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.token_tables import TokenTables


def whole_inputs(
    model: Model, ids: np.ndarray, positions: np.ndarray, doc_start: np.ndarray, first_key: int = 0
) -> Inputs:
    """Return the inputs of a forward, without targets, for sequences from their first token on.

    Args:
        ids, positions, doc_start: int32 [B, T].
        first_key: Place in the KV cache of the first of the T tokens.
    """
    device = model.device
    tables = TokenTables.empty(model.config, positions.size, int(positions.max()) + 1, device)
    if tables is not None:
        tables.write(device, positions, doc_start)
    return Inputs(
        ids=device.upload(ids.reshape(-1)),
        positions=device.upload(positions.reshape(-1)),
        doc_start=device.upload(doc_start + np.int32(first_key)),
        cache_len=device.upload(np.array([first_key], np.int32)),
        tables=tables,
    )
