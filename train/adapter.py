"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, written and read.

Matrix names in the file: `base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.errors import WgradError
from wgrad.train.files import make_folder, write_json
from wgrad.train.lora import LoraConfig, match_targets
from wgrad.train.safetensors_files import from_arrays, read_entries, write_safetensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Fields of adapter_config.json that change the arithmetic in a way that is not built here, with their harmless values.
_UNSUPPORTED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("use_dora", "DoRA", (None, False)),
    ("bias", "trained biases", (None, "none")),
    ("lora_bias", "biases of lora_B", (None, False)),
    ("fan_in_fan_out", "transposed weights", (None, False)),
    ("modules_to_save", "whole modules beside the adapter", (None, [])),
    ("layers_to_transform", "adapters on some layers only", (None, [])),
    ("trainable_token_indices", "trained token embeddings", (None, [], {})),
    ("target_parameters", "adapters on bare parameters", (None, [])),
    ("exclude_modules", "excluded modules", (None, [], "")),
    ("layer_replication", "replicated layers", (None, [])),
    ("use_qalora", "QALoRA", (None, False)),
    ("alora_invocation_tokens", "activated LoRA", (None, [])),
    ("arrow_config", "Arrow routing", (None,)),
    ("use_bdlora", "BD-LoRA", (None, False)),
    ("velora_config", "VeLoRA", (None,)),
    ("lora_ga_config", "LoRA-GA", (None,)),
)
# Ways to start that leave the base weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ) change them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def save_adapter(
    folder: str | os.PathLike[str], lora: LoraConfig, arrays: Mapping[str, np.ndarray], base_model: str
) -> None:
    """Write an adapter that PEFT loads. arrays: `<module>.lora_A`, `<module>.lora_B` -> float32. WgradError."""
    target = make_folder(folder)
    tensors = {f"{_PREFIX}{name}.weight": np.ascontiguousarray(a, np.float32) for name, a in sorted(arrays.items())}
    targets = lora.target_modules if isinstance(lora.target_modules, str) else sorted(lora.target_modules)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.r,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "use_rslora": lora.rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": {k: _number(v) for k, v in lora.alpha_pattern.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    # The weights last: a folder that has them is complete.
    write_json(Path(target) / CONFIG_FILE, config, sort_keys=True)
    write_safetensors(Path(target) / WEIGHTS_FILE, from_arrays(tensors))


def _number(value: float) -> float:
    """32 rather than 32.0, as PEFT writes a whole alpha."""
    return int(value) if value == int(value) else value


def load_adapter(
    folder: str | os.PathLike[str], modules: Mapping[str, tuple[int, int]]
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read an adapter for a model with these projections (path -> [out, in]), as `lora.linear_modules` gives them.

    -> its configuration, and `<module>.lora_A` / `.lora_B` -> float32, in the model's order. WgradError: not there, not
    LoRA, a variant that is not supported, a matrix that is missing, of another shape, or belongs to no projection.
    """
    folder = Path(folder)
    lora = _load_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise WgradError(f"--adapter: {folder} has only adapter_model.bin: save it as safetensors with PEFT")
    entries = dict(read_entries(path, "--adapter"))
    if any("lora_magnitude_vector" in name for name in entries):
        raise WgradError(f"--adapter: {path} is a DoRA adapter: only plain LoRA can be read: train it without")
    arrays = {}
    for module in match_targets(lora.target_modules, list(modules), "--adapter"):
        out, width = modules[module]
        r = lora.rank_of(module)
        for side, shape in (("lora_A", (r, width)), ("lora_B", (out, r))):
            entry = entries.pop(f"{_PREFIX}{module}.{side}.weight", None)
            if entry is None:
                raise WgradError(
                    f"--adapter: {path} lacks {module}.{side}, which {CONFIG_FILE} asks for: fetch it again"
                )
            if entry.shape != shape:
                raise WgradError(
                    f"--adapter: {module}.{side} in {path} has shape {list(entry.shape)}, the model asks for "
                    f"{list(shape)}: the adapter belongs to another model"
                )
            if entry.dtype not in ("F32", "F16", "BF16"):
                raise WgradError(f"--adapter: {module}.{side} in {path} is {entry.dtype}: expected F32, F16 or BF16")
            arrays[f"{module}.{side}"] = np.array(entry.array(), np.float32)
    if entries:
        name = next(iter(entries)).removeprefix(_PREFIX)
        raise WgradError(
            f"--adapter: {path} adapts {name}, which is no projection of this model's layers: only those can be adapted"
        )
    return lora, arrays


def _load_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WgradError(f"--adapter: {folder} has no {CONFIG_FILE}: give the folder of a PEFT adapter") from None
    except (OSError, ValueError) as error:
        raise WgradError(f"--adapter: cannot read {path}: {error}: fetch the file again") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise WgradError(f"--adapter: {path}: peft_type is {kind!r}: only LORA can be read")
    for key, what, harmless in _UNSUPPORTED:
        if raw.get(key) not in harmless:
            raise WgradError(f"--adapter: {path}: {key} is {raw[key]!r}: {what} cannot be read: train it without")
    if raw.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise WgradError(
            f"--adapter: {path}: init_lora_weights is {raw['init_lora_weights']!r}, which changes the base weights: "
            "convert it with PEFT (path_initial_model_for_weight_conversion)"
        )
    targets = raw.get("target_modules")
    if not targets or not isinstance(targets, (str, list)) or not isinstance(raw.get("r"), int) or raw["r"] < 1:
        raise WgradError(f"--adapter: {path}: r and target_modules must be given; got {raw.get('r')!r} and {targets!r}")
    return LoraConfig(
        r=raw["r"],
        alpha=float(raw.get("lora_alpha") or raw["r"]),
        dropout=float(raw.get("lora_dropout") or 0.0),
        rslora=bool(raw.get("use_rslora")),
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
    )
