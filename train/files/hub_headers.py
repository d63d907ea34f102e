"""A hub model without its weights: config.json, and files with the names, types and shapes of the weights.

The files are sparse safetensors with the headers and lengths of the hub's files, but holes instead of values, so that
code that reads no values can use them like a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_json
from wgrad.train.files.hub import cached_model, fetch_parts, hub_errors, is_hub_id, resolve_model
from wgrad.train.files.input_files import one_line

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_BY_SHAPE = ("fp8", "compressed-tensors", "gptq", "awq")  # their headers suffice to know their sizes


def model_without_weights(spec: str, scratch: Path, option: str = "--model") -> Path:
    """Return a folder for DIR_OR_HUB_ID.

    For a model that is not on this machine this is `scratch`, filled as described above; but a quantized model whose
    values are needed to know its form is fetched. Raises WgradError as `resolve_model` does.
    """
    if not is_hub_id(spec, option):
        return resolve_model(spec, option)
    cached = cached_model(spec, option)
    if cached is not None:
        return cached
    parts = fetch_parts(spec, option, [_CONFIG, _INDEX])
    if not (parts / _CONFIG).exists():
        raise WgradError(f"{option}: {spec} has no {_CONFIG} on the Hugging Face Hub: give a model")
    config = read_json(parts / _CONFIG, dict[str, Any], option, from_python=True)
    quantized = config.get("quantization_config")
    if quantized is not None and (not isinstance(quantized, dict) or quantized.get("quant_method") not in _BY_SHAPE):
        return resolve_model(spec, option)
    names = [_SINGLE]
    if (parts / _INDEX).exists():
        index = read_json(parts / _INDEX, dict[str, Any], option).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else names
        (scratch / _INDEX).write_bytes((parts / _INDEX).read_bytes())
    (scratch / _CONFIG).write_bytes((parts / _CONFIG).read_bytes())
    for name in names:
        if Path(name).name != name:
            raise WgradError(f"{option}: {spec}: {_INDEX} must name files next to it; got {one_line(name)}")
        _write_header(spec, name, scratch / name, option)
    return scratch


def _write_header(hub_id: str, name: str, path: Path, option: str) -> None:
    with hub_errors(hub_id, option) as huggingface_hub:
        found = huggingface_hub.HfApi().parse_safetensors_file_metadata(hub_id, name).tensors
    header = {
        tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        for tensor, info in found.items()
    }
    text = json.dumps(header).encode()
    end = max((info.data_offsets[1] for info in found.values()), default=0)
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    except (OSError, OverflowError) as error:
        raise WgradError(f"{option}: {hub_id}: {name} cannot be laid out in {path.parent}: {error}") from error
