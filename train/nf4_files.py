"""NF4 weights in files, as bitsandbytes and transformers store them: read, and written.

Keys beside `<module>.weight` (uint8 [ceil(n / 2), 1]): `.absmax`, `.quant_map`, with double quantisation
`.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`, a JSON object as uint8.
Source: QLoRA (arXiv 2305.14314); bitsandbytes' QuantState.as_dict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.device import Device, NF4Array
from wgrad.autograd.errors import WgradError
from wgrad.train.files import make_folder, write_json
from wgrad.train.safetensors_files import TensorEntry, TensorSource, from_arrays, write_safetensors

STATE_KEY, FP4_KEY = ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"
NF4_LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)
_AGAIN = "fetch the checkpoint again, or use the unquantised one"


def is_nf4(entries: Mapping[str, TensorEntry], name: str) -> bool:
    """Whether a checkpoint holds the tensor `name` in 4 bits (of whatever kind)."""
    return name + STATE_KEY in entries or name + FP4_KEY in entries


def read_nf4(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...], device: Device) -> NF4Array:
    """Upload one quantised weight. WgradError: a part is missing, or does not fit the others."""

    def part(suffix: str) -> np.ndarray:
        entry = entries.get(name + suffix)
        if entry is None:
            raise WgradError(f"--model: the quantised weight {name} lacks {name + suffix}: {_AGAIN}")
        return entry.array()

    def fail(what: str) -> WgradError:
        return WgradError(f"--model: the quantised weight {name} in {entries[name].path} {what}: {_AGAIN}")

    if name not in entries or name + STATE_KEY not in entries:
        raise WgradError(f"--model: the weight {name} is missing or quantised as fp4: only NF4 can be read; {_AGAIN}")
    try:
        state = json.loads(bytes(part(STATE_KEY)))
        stored, block = tuple(state["shape"]), int(state["blocksize"])
        offset, nested_block = state.get("nested_offset"), int(state.get("nested_blocksize") or 256)
    except (ValueError, KeyError, TypeError) as error:
        raise fail("has a quant_state that cannot be read") from error
    if stored != tuple(shape):
        raise fail(f"has shape {list(stored)}, not {list(shape)} as config.json asks")
    if not np.allclose(part(".quant_map"), NF4_LEVELS, rtol=0, atol=1e-6):
        raise fail("has a code book that is not NF4")
    count = shape[0] * shape[1]
    blocks = -(-count // block)
    packed = entries[name].raw()  # quant_storage may call the same bytes another dtype
    absmax = part(".absmax")
    if packed.size != -(-count // 2) or absmax.size != blocks:
        raise fail(f"has {packed.size} bytes and {absmax.size} scales for {count} values in blocks of {block}")
    common: dict[str, Any] = {"shape": (shape[0], shape[1]), "block_size": block}
    codes = device.upload(np.ascontiguousarray(packed))
    if name + ".nested_absmax" not in entries:
        return NF4Array(codes, device.upload(np.ascontiguousarray(absmax, np.float32)), **common)
    nested = part(".nested_absmax")
    if offset is None or absmax.dtype != np.uint8 or nested.size != -(-blocks // nested_block):
        raise fail("has a nested state that does not fit its scales")
    return NF4Array(
        codes,
        device.upload(np.ascontiguousarray(absmax.reshape(-1))),
        **common,
        nested_absmax=device.upload(np.ascontiguousarray(nested, np.float32)),
        nested_code=device.upload(np.ascontiguousarray(part(".nested_quant_map"), np.float32)),
        nested_offset=device.upload(np.array([offset], np.float32)),
        nested_block_size=nested_block,
    )


def nf4_arrays(name: str, weight: NF4Array, device: Device, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors that stand for one NF4 weight in a file. dtype: what a loader dequantises to."""
    down = device.download
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.block_size,
        "dtype": dtype,
        "shape": list(weight.shape),
    }
    result = {
        name: down(weight.packed).reshape(-1, 1),
        name + ".absmax": down(weight.absmax),
        name + ".quant_map": NF4_LEVELS,
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
    """Write a quantised checkpoint that transformers + bitsandbytes load: config.json and model.safetensors.

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
