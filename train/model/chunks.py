"""Attention in chunks: a token sees the tokens in front of it in its own chunk of its sequence.

Source: Llama 4 in transformers, where most layers attend so, and the others scale their queries by position.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import PAGE, Array, Device
from wgrad.train.model.model_inputs import Inputs


def in_chunks(inputs: Inputs, chunk: int, device: Device) -> Inputs:
    """Return inputs whose tokens see at most their own chunk. chunk: its length."""
    numbers = _numbers(Tensor(inputs.positions, device), chunk)
    starts = Tensor(inputs.doc_start, device) + (numbers * chunk).reshape(*inputs.doc_start.shape)
    return replace(inputs, doc_start=starts.data)


class ChunkPages:
    """Pages of the chunks in which rows of a batch decode. Made before its step is recorded.

    Args:
        rows, width: Rows of the batch, and most pages of a row.
        chunk: Length of a chunk, a multiple of PAGE.
    """

    def __init__(self, rows: int, width: int, chunk: int, device: Device) -> None:
        self._rows, self._width, self._chunk, self._device = rows, width, chunk, device
        self._own = min(chunk // PAGE, width)
        self._ahead, self._first = (
            device.upload(np.arange(count, dtype=np.int32).reshape(shape) * factor)
            for count, shape, factor in ((self._own, (1, -1), 1), (rows, (-1, 1), width))
        )

    def of(self, pages: Array, places: Array) -> tuple[Array, Array]:
        """Return the pages of each row's chunk, int32 [B, W'], and the row's place within the chunk, int32 [B].

        pages: int32 [B, W]. places: int32 [B], of one token in each row.
        """
        if self._own == self._width:
            return pages, places
        device, rows, own = self._device, self._rows, self._own
        at = Tensor(places, device)
        numbers = _numbers(at, self._chunk)
        # Beyond a row's pages lie those that no token of the chunk sees.
        columns = F.minimum((numbers * own).reshape(rows, 1) + Tensor(self._ahead, device), self._width - 1)
        ids = (columns + Tensor(self._first, device)).reshape(rows * own)
        # A lookup takes floats, which have whole numbers up to 2^24 exactly.
        table = Tensor(pages, device).to(np.float32).reshape(rows * self._width, 1)
        found = device.embedding(table.data, ids.data, dtype=np.dtype(np.float32))
        taken = Tensor(found, device).to(np.int32).reshape(rows, own)
        return taken.data, (at - numbers * self._chunk).data


def _numbers(places: Tensor, chunk: int) -> Tensor:
    """Return the number of the chunk of each place, int32. It is right for places up to 2^22, and -1 is in chunk 0."""
    return ((places.to(np.float32) + 0.5) * (1 / chunk)).to(np.int32)


def growth_by_position(positions: int, growth: float, length: int) -> np.ndarray | None:
    """Return the factors of queries by position, float32 [positions, 1]: 1 + growth log(1 + floor((p + 1) / length)).

    None: all are 1.
    """
    if not growth or positions < length:
        return None
    whole = ((np.arange(positions, dtype=np.int64) + 1) // length).astype(np.float32)
    return (np.log1p(whole) * np.float32(growth) + np.float32(1))[:, None]
