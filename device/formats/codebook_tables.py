"""Codebooks of IQ1 to IQ3.

codebooks.npy holds the codebooks one after another, with a uint16 for each entry. An element takes 2 bits (cells of 8)
or 3 bits (cells of 4), the first in the lowest bits, and is an index into the values in `TABLES`. The codebooks are
part of the file format.

Source: ggml's tables (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wgrad.device.host_matmul import host_matmul

_CHUNK = 512  # cells that are matched at once, whose distances fit into a CPU cache


class _Table(NamedTuple):
    """A codebook of `entries` cells with `cell` elements each, whose magnitudes are in `values`."""

    entries: int
    cell: int
    values: tuple[int, ...]


_TWOS, _THREES = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
TABLES = {  # in the order of codebooks.npy
    "iq2_xxs": _Table(256, 8, _TWOS),
    "iq2_xs": _Table(512, 8, _TWOS),
    "iq2_s": _Table(1024, 8, _TWOS),
    "iq3_xxs": _Table(256, 4, _THREES),
    "iq3_s": _Table(512, 4, tuple(range(1, 16, 2))),
    "iq1_s": _Table(2048, 8, (0, 1, 2)),  # indices of the values -1, 0, 1 (iq1.py)
}


@cache
def packed_codebook(format: str) -> np.ndarray:
    """Return a format's codebook as codebooks.npy has it: uint16 [entries]."""
    place = list(TABLES).index(format)
    begin = sum(table.entries for table in list(TABLES.values())[:place])
    found: np.ndarray = np.load(Path(__file__).with_name("codebooks.npy"))[begin : begin + TABLES[format].entries]
    return found


@cache
def codebook_words(format: str) -> np.ndarray:
    """Return a format's codebook for devices, as uint32 words.

    A shader negates elements within their bits. An element takes a byte, which is larger by 128. Of IQ3_S, whose
    elements are odd, an entry is a word, and an element v the 4 bits of (v + 15) / 2 from bit 1 on: their complement
    stands for -v. The codebook of IQ1 is as in codebooks.npy.
    """
    if format == "iq1_s":
        return packed_codebook(format).view("<u4")
    values = codebook(format)
    if format == "iq3_s":
        words: np.ndarray = ((values.astype(np.uint32) + 15) << np.arange(0, 16, 4, dtype=np.uint32)).sum(
            axis=1, dtype="<u4"
        )
        return words
    found: np.ndarray = (values + np.uint8(128)).reshape(-1).view("<u4")
    return found


@cache
def codebook(format: str) -> np.ndarray:
    """Return the elements of a format's codebook, without signs: uint8 [entries, cell]."""
    table = TABLES[format]
    bits = 2 if table.cell == 8 else 3
    shifts = np.arange(table.cell, dtype=np.uint16) * np.uint16(bits)
    numbers = packed_codebook(format)[:, None] >> shifts & np.uint16((1 << bits) - 1)
    values: np.ndarray = np.array(table.values, np.uint8)[numbers]
    return values


def nearest_entries(cells: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return for each row of `cells` the index of the table's entry with the smallest squared error."""
    table = table.astype(np.float32)
    middles = (table**2).sum(axis=1) / 2
    parts = np.split(cells, range(_CHUNK, len(cells), _CHUNK))
    return np.concatenate([(host_matmul(part, table.T) - middles).argmax(axis=1) for part in parts])
