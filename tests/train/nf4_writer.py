"""NF4 weights written as bitsandbytes and transformers store them: what `train/files/nf4_files.py` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.contract import Device
from wgrad.device.files import make_folder, write_json
from wgrad.device.formats.nf4 import LEVELS, NF4Array
from wgrad.train.files.nf4_files import STATE_KEY
from wgrad.train.files.safetensors_files import TensorSource, from_arrays, write_safetensors


def nf4_arrays(name: str, weight: NF4Array, device: Device) -> dict[str, np.ndarray]:
    """Return the tensors of an NF4 weight in a file."""
    down = device.download
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.block_size,
        "dtype": weight.value_dtype,
        "shape": list(weight.shape),
    }
    result = {
        name: down(weight.packed).reshape(-1, 1),
        name + ".absmax": down(weight.absmax),
        name + ".quant_map": LEVELS,
    }
    if weight.nested:
        state |= {"nested_blocksize": weight.nested_block_size, "nested_dtype": "float32"}
        state["nested_offset"] = float(down(weight.nested_offset)[0])
        result[name + ".nested_absmax"] = down(weight.nested_absmax)
        result[name + ".nested_quant_map"] = down(weight.nested_code)
    result[name + STATE_KEY] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return result


def save_nf4_checkpoint(
    folder: str | os.PathLike[str], config: Mapping[str, Any], weights: Mapping[str, Any], device: Device
) -> None:
    """Write a quantized checkpoint that transformers + bitsandbytes load: config.json and model.safetensors.

    config: the mapping of the original config.json. weights: name -> Array or NF4Array, as `load_frozen` gives them.
    """
    target = make_folder(folder)
    tensors: list[TensorSource] = []
    nested = False
    for name, weight in weights.items():
        if isinstance(weight, NF4Array):
            nested = nested or weight.nested
            tensors.extend(from_arrays(nf4_arrays(name, weight, device)))
        else:
            fetch = lambda w=weight: device.download(w)  # noqa: E731
            tensors.append(TensorSource(name, np.dtype(weight.dtype), tuple(weight.shape), fetch))
    write_safetensors(Path(target) / "model.safetensors", tensors)
    quantization = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
    }
    write_json(Path(target) / "config.json", {**config, "quantization_config": quantization})
