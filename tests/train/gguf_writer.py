"""GGUF files of small models, written with the gguf package; blocks of the formats that it only reads are made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HEADS = {"q_proj": 4, "k_proj": 2}
# As llama.cpp mixes them, and every format: of rows of 256, and of o_proj's rows of 64. Layer 1 has some of its own.
ALL = {
    "q_proj": Kind.Q4_K,
    "k_proj": Kind.Q5_K,
    "v_proj": Kind.Q6_K,
    "o_proj": Kind.Q4_0,
    "gate_proj": Kind.MXFP4,
    "up_proj": Kind.F16,
    "down_proj": Kind.Q8_0,
    "1.o_proj": Kind.Q4_1,
    "1.gate_proj": Kind.Q5_0,
    "1.down_proj": Kind.Q5_1,
    "embed_tokens": Kind.Q6_K,
    "lm_head": Kind.BF16,
}
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
    """As llama.cpp's converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
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
    """What the gguf package makes of a file's tensors."""
    found = {}
    for name, value in weights.items():
        kind = kind_of(name, value, kinds)
        found[name] = gguf.dequantize(quantized(value, kind), kind)
    return found


def quantized(value: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes (or floats) of a tensor in a file."""
    if kind not in _BLOCKS:
        return gguf.quantize(value, kind)
    return _BLOCKS[kind](value.reshape(-1, 256)).reshape(value.shape[0], -1)


# ---- blocks by their definition in ggml-common.h ---------------------------------------------------------------
def _with_minima(blocks: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """d, dmin and the twelve bytes of scales [blocks, 16], and codes [blocks, 8, 32]."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(axis=2), 0)
    step = (groups.max(axis=2) + least) / largest
    heads = np.stack([step.max(axis=1), least.max(axis=1)], axis=1) / 63
    heads = heads.astype(np.float16)
    d, dmin = heads.astype(np.float64).T[..., None]
    sc, m = np.rint(step / d).astype(np.uint8), np.rint(least / dmin).astype(np.uint8)
    codes = np.rint((groups + (dmin * m)[..., None]) / np.maximum(d * sc, 1e-9)[..., None]).clip(0, largest)
    scales = np.empty((len(groups), 12), np.uint8)
    for j in range(4):
        scales[:, j] = sc[:, j] | (sc[:, j + 4] >> 4) << 6
        scales[:, j + 4] = m[:, j] | (m[:, j + 4] >> 4) << 6
        scales[:, j + 8] = sc[:, j + 4] & 15 | (m[:, j + 4] & 15) << 4
    return np.concatenate([heads.view(np.uint8), scales], axis=1), codes.astype(np.uint8)


def _low_bits(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(len(codes), 128)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _with_minima(blocks, 15)
    return np.concatenate([head, _low_bits(codes)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _with_minima(blocks, 31)
    fifth = sum((codes[:, g] >> 4) << g for g in range(8))
    return np.concatenate([head, fifth, _low_bits(codes)], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    step = np.abs(groups).max(axis=2) / 31
    d = (step.max(axis=1) / 127).astype(np.float16)
    scales = np.rint(step / d[:, None].astype(np.float64))
    size = np.maximum(scales * d[:, None].astype(np.float64), 1e-9)[..., None]
    codes = (np.rint(groups / size).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # halves, quarters
    low = np.concatenate([codes[:, :, 0:2] & 15 | (codes[:, :, 2:4] & 15) << 4], axis=2).reshape(-1, 128)
    high = sum((codes[:, :, q] >> 4) << 2 * q for q in range(4)).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), d[:, None].view(np.uint8)], axis=1)


_BLOCKS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}
