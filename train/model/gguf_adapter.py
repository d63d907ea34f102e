"""An adapter for llama.cpp: a GGUF file of `<tensor>.lora_a` [r, in] and `<tensor>.lora_b` [out, r].

llama.cpp scales by adapter.lora.alpha / r, with one alpha for all modules. A module's own alpha, or rsLoRA, is
multiplied into its lora_b. For architectures whose rotary embedding rotates adjacent rows, llama.cpp permutes the rows
of q and k, so the rows of their lora_b are permuted as well.
Source: github.com/ggml-org/llama.cpp, convert_lora_to_gguf.py, src/llama-adapter.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.files import atomic_file
from wgrad.train.files.gguf_files import permute, require_gguf
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.model.adapter_config import refuse_variant
from wgrad.train.model.gguf_experts import name_map, parts_in_gguf, tensor_name
from wgrad.train.model.gguf_linear import order_of
from wgrad.train.model.gguf_mamba import multiplier
from wgrad.train.model.gguf_model import otherwise_in_llama_cpp
from wgrad.train.model.gguf_shared_keys import UNADAPTED
from wgrad.train.model.lora import LoraConfig
from wgrad.train.model.model_config import ModelConfig


def is_gguf_adapter(path: Path) -> bool:
    """Return whether a file is an adapter in GGUF, which may be overwritten."""
    try:
        return any(entry.key == "general.type" and entry.value == b"adapter" for entry in read_metadata(path, ""))
    except WgradError:
        return False


def save_gguf_adapter(
    path: str | os.PathLike[str],
    config: ModelConfig,
    lora: LoraConfig,
    arrays: Mapping[str, np.ndarray],
    dtype: np.dtype,
    option: str,
) -> None:
    """Write an adapter to a GGUF file, atomically.

    Args:
        arrays: Matrices by name, as `load_adapter` returns them.
        dtype: float32 or float16.
        option: Option that named the file, for errors.

    Raises:
        WgradError: GGUF adapters of this model are not supported, a value is too large for float16, the file cannot be
            written, or the `gguf` package is missing.
    """
    if lora.dora:
        raise WgradError(
            f"{option}: a GGUF adapter has no place for DoRA's magnitudes: merge it: wgrad merge --format gguf"
        )
    refuse_variant(lora, option)
    gguf = require_gguf(option, os.fspath(path))
    architecture = config.gguf
    if found := otherwise_in_llama_cpp(config):
        raise WgradError(
            f"{option}: the adapter's base model has {found[0]}, but llama.cpp {found[1]}: merge it: wgrad merge"
        )
    if not architecture:
        raise WgradError(
            f"{option}: an adapter of {config.architecture} cannot be written into GGUF here: use llama.cpp's "
            "convert_lora_to_gguf.py"
        )
    _refuse_latents(config, arrays, option)
    modules = [name.removesuffix(".lora_A") for name in arrays if name.endswith(".lora_A")]
    factors = {module: lora.scaling_of(module) * lora.rank_of(module) for module in modules}
    alpha = next((factor for factor in factors.values() if factor), 1.0)  # 0 would mean "no scale" to llama.cpp
    names = name_map(gguf, architecture, config.num_hidden_layers)
    tensors = {}
    for module, factor in factors.items():
        for part, a, b in _parts(config, module, arrays):
            a, b = _as_llama_cpp_reads(config, module, a, b * np.float32(factor / alpha), option)
            name = tensor_name(names, part)
            for side, value in (("lora_a", a), ("lora_b", b)):
                tensors[f"{name}.{side}"] = _stored(value, dtype, f"{module}.{side}")
    with atomic_file(path, option=option) as file:
        writer = gguf.GGUFWriter(None, architecture)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        for name, value in tensors.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _as_llama_cpp_reads(
    config: ModelConfig, module: str, a: np.ndarray, b: np.ndarray, option: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a module's matrices with rows, columns and factors as llama.cpp has them in the module's weight.

    Raises:
        WgradError: llama.cpp applies no adapter to this module.
    """
    if heads := heads_side_by_side(config, module):
        b = permute(b, heads)
    if (rows := multiplier(config, f"{module}.weight")) is not None:
        b = b * rows.reshape(-1, 1)
    if ordered := order_of(config, module):
        a, b = (a, b[ordered[1]]) if ordered[0] == "rows" else (a[:, ordered[1]], b)
    if any(path in module for path in UNADAPTED):
        raise WgradError(
            f"{option}: llama.cpp takes no adapter of {module}: merge it: wgrad merge --format gguf, or train "
            "without that module"
        )
    return a, b


def _stored(value: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Return a matrix in the dtype of the file. Raises WgradError if a value is too large for it."""
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(value, dtype)
    if not np.isfinite(stored).all():
        largest = float(np.abs(value).max())
        raise WgradError(f"--type: {name} has {largest:.3g}, more than {dtype} holds: use float32")
    return stored


def _refuse_latents(config: ModelConfig, arrays: Mapping[str, np.ndarray], option: str) -> None:
    """Raise WgradError for modules of latent attention whose adapter llama.cpp would ignore without a message."""
    passed_over = tuple(f".{module}.lora_A" for module in config.latent.biases) if config.latent else ()
    for name in arrays:
        if passed_over and name.endswith(passed_over):
            raise WgradError(
                f"{option}: llama.cpp does not apply an adapter of {name.split('.')[-2]} in latent attention: merge "
                "it: wgrad merge --format gguf"
            )


def _parts(
    config: ModelConfig, module: str, arrays: Mapping[str, np.ndarray]
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return the GGUF tensors of a module, each as Hugging Face's name, lora_A and lora_B."""
    a, b = arrays[f"{module}.lora_A"], arrays[f"{module}.lora_B"]
    name = f"{module}.weight" if a.ndim == 2 else module
    parts = parts_in_gguf(config, name, b.shape)
    return [(part, a, b[..., rows, :]) for part, rows in parts.items()] or [(name, a, b)]


def heads_side_by_side(config: ModelConfig, module: str) -> int:
    """Return the number of heads of a projection whose rows llama.cpp permutes; 0 if it keeps Hugging Face's order."""
    if not config.gguf_traits.paired or config.interleaved:
        return 0
    part = module.rpartition(".")[2]
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part, 0)
