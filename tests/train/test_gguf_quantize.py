"""Weights in GGUF's types: bits of llama.cpp's own quantizer, and which tensor of a mix has which type."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from wgrad.device.formats.gguf_quantize import quantize_rows
from wgrad.train.files.imatrix_file import Imatrix
from wgrad.train.model.gguf_mix import MIXES, stored_type
from wgrad.train.model.gguf_model import GgufModel
from wgrad.train.model.gguf_write import save_gguf
from wgrad.train.model.load_config import load_model_config, parse_model_config
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.weights import weight_specs

pytestmark = pytest.mark.oracle
F32 = np.dtype(np.float32)


@cache
def library() -> Any:
    """ggml, which the package xllamacpp has within its extension module."""
    package = pytest.importorskip("xllamacpp")
    (path,) = Path(package.__file__).parent.glob("*.so")
    found = ctypes.CDLL(str(path))
    numbers: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    found.ggml_quantize_chunk.argtypes, found.ggml_quantize_chunk.restype = numbers, ctypes.c_size_t
    return found


def theirs(w: np.ndarray, kind: Kind, importance: np.ndarray | None = None) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    w, out = np.ascontiguousarray(w, F32), np.zeros((len(w), w.shape[1] // block * size), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    made = library().ggml_quantize_chunk(int(kind), w.ctypes.data, out.ctypes.data, 0, *w.shape, weights)
    assert made == out.nbytes
    return out


@pytest.mark.parametrize("important", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_bits_are_those_of_llama_cpp(kind: str, important: bool, rng: np.random.Generator) -> None:
    """Rows of many sizes; zeros, one sign, one value, ties, values that are far larger or smaller than the others. With
    an importance matrix, of columns that cost nothing or a lot, or without one."""
    w = (rng.standard_normal((101, 512)) * np.exp2(rng.integers(-9, 3, (101, 1)))).astype(F32)
    w[3, :256], w[4, 32:64] = 0, 0
    w[5], w[6], w[7], w[8, :32] = np.abs(w[5]), -np.abs(w[6]), 0.25, -0.5
    w[9] *= np.float32(1e-20)
    w[10, ::7], w[12, 5::32] = 1e3, 40
    w[11] = np.round(8 * rng.standard_normal(512)) / 4 + 1  # of which two can be the largest
    w[13, 64:96] *= np.float32(1e-4)  # a group whose scale becomes 0
    importance = (rng.standard_normal(512) ** 2 * np.exp2(rng.integers(-9, 9, 512))).astype(F32) if important else None
    if importance is not None:
        importance[64:70] = 0
    np.testing.assert_array_equal(quantize_rows(gguf, w, kind, importance), theirs(w, Kind[kind], importance))


def types_of(mix: str, folder: Path, imatrix: Imatrix | None = None, **changes: Any) -> dict[str, str]:
    """GGUF's names of a model's matrices, and their types."""
    raw = tiny_config(**{"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} | changes)
    weights = random_weights(tiny_config(num_hidden_layers=1)) if changes.get("num_hidden_layers", 2) > 2 else {}
    write_checkpoint(folder, raw, weights or random_weights(raw))
    model = GgufModel(load_model_config(folder), ModelFiles(folder), mix, imatrix)
    return {model._names[spec.name]: model.stored(spec) for spec in weight_specs(model.config) if len(spec.shape) == 2}


def layers(types: dict[str, str], part: str, kind: str) -> list[int]:
    return [int(name.split(".")[1]) for name, found in types.items() if f".{part}." in name and found == kind]


# Of a LLaMA of 32 layers: those of some layers' value and down projections, of the embedding, of the output layer.
MORE = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
OF_32_LAYERS = {
    "q8_0": ("Q8_0", [], "Q8_0", [], "Q8_0", "Q8_0"),
    "q6_k": ("Q6_K", [], "Q6_K", [], "Q6_K", "Q6_K"),
    "q5_k_m": ("Q6_K", MORE, "Q6_K", MORE, "Q5_K", "Q6_K"),
    "q5_0": ("Q5_0", [], "Q5_0", [], "Q5_0", "Q6_K"),
    "q4_k_m": ("Q6_K", MORE, "Q6_K", MORE, "Q4_K", "Q6_K"),
    "q4_1": ("Q4_1", [], "Q4_1", [], "Q4_1", "Q6_K"),
    "q4_0": ("Q4_0", [], "Q4_0", [], "Q4_0", "Q6_K"),
    "iq4_xs": ("Q5_K", [], "Q5_K", [0, 1, 2, 3], "IQ4_XS", "Q6_K"),
    "mxfp4": ("MXFP4", [], "MXFP4", [], "Q8_0", "Q8_0"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_give_each_tensor_its_type(mix: str, tmp_path: Path) -> None:
    values, more_values, down, more_down, embedding, output = OF_32_LAYERS[mix]
    found = types_of(mix, tmp_path / "model", num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=2)
    usual, every = MIXES[mix], list(range(32))
    assert layers(found, "attn_v", values) == (more_values or (every if values == usual else []))
    assert layers(found, "ffn_down", down) == (more_down or (every if down == usual else []))
    assert (found["token_embd.weight"], found["output.weight"]) == (embedding, output)
    rest = {kind for name, kind in found.items() if name.startswith("blk") and "attn_v" not in name}
    assert {kind for kind in rest if kind != down} <= {usual} and found["blk.7.attn_v.weight"] == usual
    if mix == "iq4_xs":
        grouped = types_of(mix, tmp_path / "grouped", num_attention_heads=4, num_key_value_heads=1)
        assert layers(grouped, "attn_v", "Q5_K") == [0, 1]
    if mix == "q4_k_m":
        large = types_of(mix, tmp_path / "large", num_hidden_layers=80)
        assert set(map(large.get, (f"blk.{i}.attn_v.weight" for i in every))) == {"Q5_K", "Q6_K"}
        tied = types_of(mix, tmp_path / "tied", tie_word_embeddings=True)
        assert tied["token_embd.weight"] == "Q6_K" and "output.weight" not in tied


def test_layers_of_hybrid_models_count_as_llama_cpp_counts_them(tmp_path: Path) -> None:
    """Values by the layers with attention alone; down projections one after another, of as many as there are layers."""
    config = parse_model_config(tiny_config("NemotronHForCausalLM", hybrid_override_pattern="M-M*M-M*" * 8))
    kinds = {
        part: [i for i in layers if stored_type(config, "q4_k_m", f"blk.{i}.{part}.weight", 256, False) == "Q6_K"]
        for part, layers in {"attn_v": range(3, 64, 4), "ffn_down": range(1, 64, 4)}.items()
    }
    assert kinds["attn_v"] == [3 + 4 * i for i in (0, 1, 4, 7, 10, 13, 14, 15)]  # of 16
    assert kinds["ffn_down"] == [1 + 4 * i for i in (0, 1, 2, 3, 4, 5, 6, 7, 10, 13)]  # of 64


@pytest.mark.parametrize("mix", ["q4_k_m", "iq4_xs"])
def test_a_file_has_the_bits_of_llama_cpp(mix: str, tmp_path: Path) -> None:
    """Its rows of 96 have types with smaller blocks."""
    raw = tiny_config(hidden_size=256, intermediate_size=96, head_dim=16)
    folder = write_checkpoint(tmp_path / "model", raw, random_weights(raw))
    files = ModelFiles(folder)
    made = []
    for kind in ("float32", mix):
        model = GgufModel(load_model_config(folder), files, kind)
        save_gguf(tmp_path / f"{kind}.gguf", model, lambda spec: files.entries[spec.name].array(), lambda *_: None)
        made.append({t.name: t for t in gguf.GGUFReader(tmp_path / f"{kind}.gguf").tensors})
    plain, found = made
    kinds = {name: tensor.tensor_type for name, tensor in found.items()}
    assert {Kind.Q6_K, Kind[MIXES[mix]], Kind.IQ4_NL if mix == "iq4_xs" else Kind.Q8_0} <= set(kinds.values())
    for name, kind in kinds.items():
        wanted = plain[name].data if kind == Kind.F32 else theirs(plain[name].data, kind)
        np.testing.assert_array_equal(found[name].data, wanted, name)
