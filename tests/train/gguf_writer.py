"""GGUF files of small models, written with the gguf package."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.gguf_formats import FORMAT_ROWS

HEADS = {"q_proj": 4, "k_proj": 2}
# Every format. Layers have some of their own.
ALL = {"up_proj": Kind.F16, "lm_head": Kind.BF16}
ALL |= {name: Kind[kind] for kind, row in FORMAT_ROWS.items() for name in row.tensors}
LAYERS = 4  # of a model with them all
Kinds: TypeAlias = Kind | dict[str, Kind]


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head for rotary pairs side by side: row 2i is row i, row 2i + 1 is row i + half."""
    halves = np.stack(np.split(w.reshape(heads, -1, w.shape[-1]), 2, axis=1), axis=2)
    return halves.reshape(w.shape)


def kind_of(name: str, value: np.ndarray, kinds: Kinds) -> Kind:
    """Matrices in `kinds`, norms in float32."""
    if value.ndim < 2:
        return Kind.F32
    if not isinstance(kinds, dict):
        return kinds
    parts = name.split(".")
    own = f"{parts[2]}.{parts[-2]}" if parts[1] == "layers" else ""
    return kinds.get(own, kinds[parts[-2]])


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], kinds: Kinds, architecture: str = "llama", alignment: int = 0
) -> None:
    """Write a GGUF file as llama.cpp's converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_head_count(HEADS["q_proj"])
    writer.add_head_count_kv(HEADS["k_proj"])
    for name, value in weights.items():
        heads, stored = HEADS.get(name.split(".")[-2], 0), kind_of(name, value, kinds)
        value = permuted(value, heads) if heads else value
        writer.add_tensor(names.get_name(name, (".weight",)) or name, quantized(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restored(weights: dict[str, np.ndarray], kinds: Kinds) -> dict[str, np.ndarray]:
    """Return a file's tensors as the gguf package reads them."""
    found = {}
    for name, value in weights.items():
        kind = kind_of(name, value, kinds)
        found[name] = gguf.dequantize(quantized(value, kind), kind)
    return found


def quantized(value: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes (or floats) of a tensor in a file. Of a type that the package only reads, any codes for each row, of
    values about as large."""
    try:
        return gguf.quantize(value, kind)
    except NotImplementedError:
        pass
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = [np.random.default_rng(zlib.crc32(row.tobytes())).bytes(row.size // block * size) for row in value]
    blocks = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, size).copy()
    if kind in (Kind.NVFP4, Kind.IQ1_M):  # scales of 8 bits: all of 2^-6; a float16 in pieces: all of 2^-7
        if kind == Kind.NVFP4:
            blocks[:, :4] = 8
        else:
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | np.array([0, 0, 0, 0x20], np.uint8)
        return blocks.reshape(len(value), -1)
    scale = 1.0
    for _ in range(2):
        for at, share in FORMAT_ROWS[kind.name].halves.items():
            blocks[:, at : at + 2] = np.full(1, share * scale, "<f2").view(np.uint8)
        scale *= 2.0 ** np.rint(np.log2(value.std() / gguf.dequantize(blocks, kind).std()))  # the same in any order
    return blocks.reshape(len(value), -1)
