"""Embeddings of texts from a model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import no_grad
from wgrad.device.errors import UnusableResult
from wgrad.train.data.packing import ROW_STEP, Document, make_batch
from wgrad.train.files.decode import read_json
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.model import Model
from wgrad.train.options.choices import Pooling

POOLING_FILE = "1_Pooling/config.json"  # in models of sentence-transformers


def embed(model: Model, texts: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
    """Return vectors of length 1, float32 [N, C], of N texts of token ids: the mean or the last of the final hidden
    states.

    The texts are read together, as a row of packed documents.

    Raises:
        UnusableResult: the hidden states are not finite.
    """
    device, ends = model.device, np.cumsum([len(ids) for ids in texts])
    documents = [Document(np.array(ids, np.int32), np.ones(len(ids), np.bool_)) for ids in texts]
    row = make_batch([documents], 1, -(-int(ends[-1]) // ROW_STEP) * ROW_STEP)
    inputs = whole_inputs(model, row.ids, row.positions, row.doc_start)
    with no_grad():
        hidden = model.hidden(inputs)
        if pooling == "last":
            hidden = F.embedding(hidden, device.upload((ends - 1).astype(np.int32)), dtype=hidden.dtype)
    found = device.download(hidden.data).astype(np.float32)
    if pooling == "mean":
        starts = np.concatenate([[0], ends[:-1]])
        found = np.add.reduceat(found[: ends[-1]], starts, axis=0) / (ends - starts)[:, None].astype(np.float32)
    if not np.isfinite(found).all():
        raise UnusableResult(
            "the model's outputs are not finite (NaN or infinity), so that the text has no embedding: use --compute "
            "float32, or fetch the weights again"
        )
    vectors: np.ndarray = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-30))
    return vectors


def pooling_of(folder: Path) -> Pooling:
    """Return the pooling that the model's files name; by default the mean."""
    path = folder / POOLING_FILE
    if not path.is_file():
        return "mean"
    config = read_json(path, dict[str, Any], "--model")
    last = config.get("pooling_mode_lasttoken") is True or config.get("pooling_mode") == "lasttoken"
    return "last" if last else "mean"
