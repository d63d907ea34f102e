"""A whole model in Hugging Face layout, written from the trained parameters (`--full`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.files import write_bytes, write_json
from wgrad.train.files.decode import read_json
from wgrad.train.files.safetensors_files import TensorSource, write_safetensors
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import WeightSpec, weight_specs

# What a model needs beside its weights, copied as it is.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_full(
    out: str | os.PathLike[str], base: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: ModelConfig
) -> None:
    """Write config.json, tokenizer and model.safetensors (float32) into `out`; what is not weights comes from `base`.

    The weights come last: a folder that has them is complete. WgradError where the disk is full.
    """
    out, base = Path(out), Path(base)
    for name in _COPIED:
        if (base / name).exists():
            write_bytes(out / name, (base / name).read_bytes())
    raw = read_json(base / "config.json", dict[str, Any], "--model")
    raw.pop("torch_dtype", None)
    raw |= {"dtype": "float32", "tie_word_embeddings": config.tie_word_embeddings}
    write_json(out / "config.json", raw)

    def source(spec: WeightSpec) -> TensorSource:
        tensor = tensors[spec.name]
        fetch = lambda: tensor.device.download(tensor.data) - np.float32(spec.offset)  # noqa: E731
        return TensorSource(spec.name, np.dtype(np.float32), spec.shape, fetch)

    write_safetensors(out / "model.safetensors", [source(spec) for spec in weight_specs(config)])
