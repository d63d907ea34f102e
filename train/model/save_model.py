"""Writing a whole model in Hugging Face layout, as after full fine-tuning (`--full`) or merging."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.files import write_bytes, write_text
from wgrad.train.files.decode import read_json
from wgrad.train.files.input_files import exists, open_input, reading
from wgrad.train.files.safetensors_files import TensorEntry, TensorSource, write_safetensors
from wgrad.train.model.expert_files import written_tensors
from wgrad.train.model.linear_files import as_in_files
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, Progress, dtype_of
from wgrad.train.model.weights import WeightSpec, constants, weight_specs

# Other files of a multimodal model, which are copied unchanged.
_COPIED = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "spk_dict.pt")

SaveTokenizer = Callable[[Path], None]  # writes its files into a folder


def save_full(
    out: str | os.PathLike[str],
    base: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    save_tokenizer: SaveTokenizer,
) -> None:
    """Write a fully fine-tuned model to `out`: config.json, tokenizer, and model.safetensors in float32.

    The weights are written last, so a folder that has them is complete.

    Args:
        base: Folder of the base model, whose config.json is used.
        tensors: Trained parameters by name.
        save_tokenizer: Writes the tokenizer's files into a folder.

    Raises:
        WgradError: A file cannot be written.
    """

    def value(spec: WeightSpec) -> np.ndarray:
        tensor = tensors[spec.name]
        return tensor.device.download(tensor.data) - np.float32(spec.offset)

    save_model(out, base, config, np.dtype(np.float32), value, save_tokenizer)


def save_model(
    out: str | os.PathLike[str],
    base: str | os.PathLike[str],
    config: ModelConfig,
    dtype: np.dtype,
    value: Callable[[WeightSpec], np.ndarray],
    save_tokenizer: SaveTokenizer,
    progress: Progress | None = None,
) -> None:
    """Write a model as `save_full` does, tensor by tensor.

    The parts of a multimodal model besides its text model are copied.

    Args:
        dtype: Dtype of the weights.
        value: Returns a tensor with the values for the file. It is called when the tensor is written.

    Raises:
        WgradError: A file cannot be read or written.
    """
    out = Path(out)
    specs = weight_specs(config)
    files = ModelFiles(base) if config.text_of else None
    beside = files.beside_text() if files else []
    save_description(out, base, config, dtype, save_tokenizer)

    def fetch(done: int, spec: WeightSpec) -> np.ndarray:
        if progress:
            progress(done, len(specs))
        return value(spec)

    sources = list(as_in_files(written_tensors(specs, config, dtype, fetch), config))
    for name, number in constants(config).items():
        sources.append(TensorSource(name, dtype, (), partial(np.asarray, number, dtype)))
    named = _names_in(files.entries if files else {})
    sources = [replace(source, name=named(source.name)) for source in sources]
    sources += [TensorSource(entry.name, dtype_of(entry), entry.shape, entry.array) for entry in beside]
    write_safetensors(out / "model.safetensors", sources)


def _names_in(entries: Mapping[str, TensorEntry]) -> Callable[[str], str]:
    """Return a function from the name of a text model's tensor to that in a multimodal model's files.

    Tensors that those files have in another form, such as experts, get the prefix of their layer.

    Args:
        entries: The tensors of the files by the text model's names.
    """
    prefixes = {}
    for own, entry in entries.items():
        layer = _layer_of(own)
        prefixes[layer] = entry.name.removesuffix(own.removeprefix(layer))

    def name_of(name: str) -> str:
        if name in entries:
            return entries[name].name
        layer = _layer_of(name)
        return prefixes[layer] + name.removeprefix(layer) if layer in prefixes else name

    return name_of


def _layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3]) + "."


def save_description(
    out: str | os.PathLike[str],
    base: str | os.PathLike[str],
    config: ModelConfig,
    dtype: np.dtype,
    save_tokenizer: SaveTokenizer,
    over: Mapping[str, Any] = {},
) -> None:
    """Write a model's files besides its weights: config.json, tokenizer, and those of a multimodal model's processors.

    Args:
        dtype: Dtype of the weights.
        over: Keys of config.json that replace the base's.
    """
    out, base = Path(out), Path(base)
    for name in _COPIED:
        if exists(base / name, "--model"):
            with open_input(base / name, "--model") as file, reading(base / name, "--model"):
                data = file.read()
            write_bytes(out / name, data)
    save_tokenizer(out)
    raw = read_json(base / "config.json", dict[str, Any], "--model", from_python=True)
    for key in ("torch_dtype", "quantization_config"):
        raw.pop(key, None)
    raw |= {"dtype": dtype.name, "tie_word_embeddings": config.tie_word_embeddings, **over}
    write_text(out / "config.json", json.dumps(raw, indent=2, ensure_ascii=False) + "\n")  # keeps Infinity
