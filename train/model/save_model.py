"""A whole checkpoint in Hugging Face layout, written from the trained parameters (`--full`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.device.files import write_bytes, write_json
from wgrad.train.files.decode import read_json
from wgrad.train.files.safetensors_files import TensorSource, write_safetensors
from wgrad.train.model.weights import HEAD
from wgrad.train.run.optim import FlatParameters

# What a checkpoint needs beside its weights, copied as it is.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_full(
    out: str | os.PathLike[str], base: str | os.PathLike[str], parameters: FlatParameters, device: Device
) -> None:
    """Write config.json, tokenizer and model.safetensors (float32) into `out`; what is not weights comes from `base`.

    The weights come last: a folder that has them is complete. WgradError where the disk is full.
    """
    out, base = Path(out), Path(base)
    for name in _COPIED:
        if (base / name).exists():
            write_bytes(out / name, (base / name).read_bytes())
    config = read_json(base / "config.json", dict[str, Any], "--model")
    config.pop("torch_dtype", None)
    config |= {"dtype": "float32", "tie_word_embeddings": HEAD not in parameters.tensors}
    write_json(out / "config.json", config)

    def source(name: str, tensor: Tensor) -> TensorSource:
        return TensorSource(name, np.dtype(np.float32), tensor.shape, lambda: device.download(tensor.data))

    tensors = [source(name, tensor) for name, tensor in parameters.tensors.items()]
    write_safetensors(out / "model.safetensors", tensors)
