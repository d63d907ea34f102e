"""Random documents in packed sequences."""

from __future__ import annotations

import numpy as np


def document_starts(rng: np.random.Generator, batch: int, length: int, documents: int) -> np.ndarray:
    """Return the index of the first token of each token's document: int32 [batch, length]."""
    doc_start = np.zeros((batch, length), np.int32)
    for row in doc_start:
        for first in np.sort(rng.integers(1, max(2, length), documents - 1)):
            row[first:] = first
    return doc_start
