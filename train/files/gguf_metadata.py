"""Reading the metadata of a GGUF file: keys, values and types, for writing them into another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wgrad.train.files.gguf_files import open_reader, require_gguf


class Entry(NamedTuple):
    """A key. value: a number, a bool, bytes, or a list of them; type, sub_type: gguf.GGUFValueType."""

    key: str
    value: Any
    type: Any
    sub_type: Any


def read_metadata(path: Path, source: str) -> list[Entry]:
    """Return every key of a file, including the tokenizer's. Raises as `read_gguf_entries`."""
    kinds = require_gguf(source, path).GGUFValueType
    reader, found = open_reader(path, source), []
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):  # of the file itself
            continue
        kind, *inner = field.types
        if kind == kinds.ARRAY:
            value = _array(reader, field.parts[-1], inner[0])
        else:
            value = field.parts[-1].tobytes() if kind == kinds.STRING else field.parts[-1][0].item()
        found.append(Entry(name, value, kind, inner[0] if inner else None))
    return found


def _array(reader: Any, data: np.ndarray, kind: Any) -> list[Any]:
    """Return the items of an array. data: their bytes, whose length the reader has checked."""
    if kind in reader.gguf_scalar_to_np:
        return list(data.view(reader.gguf_scalar_to_np[kind]).tolist())
    raw, at, found = data.tobytes(), 0, []
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 8], "little")
        found.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    return found
