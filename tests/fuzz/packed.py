"""Checkpoints with weights of few bits as other tools store them, and with experts: sound ones, changed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.base import FFN, FINETUNE, GENERATE, HIDDEN, dump, model_config, model_files, model_weights
from tests.fuzz.case import Case, Files
from tests.fuzz.values import hostile, mutate_json, write_json
from tests.fuzz.weights import mutate_safetensors, replace_values

GROUP, PER_WORD, EXPERTS = 16, 8, 4
_COMPRESSED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def _compressed(layout: str, *groups: dict[str, Any]) -> dict[str, Any]:
    named = {
        f"group_{number}": {"targets": ["Linear"], "input_activations": None, **group}
        for number, group in enumerate(groups)
    }
    fixed = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**fixed, "format": layout, "config_groups": named}


def _float(bits: int) -> dict[str, Any]:
    return {"weights": {"num_bits": bits, "type": "float", "group_size": GROUP}}


_QUANTIZATION: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "compressed": _compressed("pack-quantized", {"weights": _COMPRESSED}),
    "nvfp4": _compressed("nvfp4-pack-quantized", _float(4)),
    "mxfp4": _compressed("mxfp4-pack-quantized", _float(4)),
    "mxfp8": _compressed("mxfp8-quantized", _float(8)),
    "mixed": _compressed(
        "mixed-precision",
        {"format": "pack-quantized", "weights": _COMPRESSED},
        {"format": "nvfp4-pack-quantized", **_float(4)},
    ),
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
}


def packed_groups() -> dict[str, Files]:
    """A model in each layout of few bits, and one with experts."""
    groups: dict[str, Files] = {}
    for method, quantization in _QUANTIZATION.items():
        config = model_config() | {"quantization_config": quantization}
        groups[method] = model_files(config, _packed(model_weights(model_config()), method))
    config = model_config("Qwen3ForCausalLM") | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": FFN,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }
    groups["experts"] = model_files(config, _with_experts(model_weights(model_config("Qwen3ForCausalLM"))))
    return groups


def _words(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32).view(np.int32)


def _int4(rows: int, columns: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "weight_packed": _words(generator, rows, columns // PER_WORD),
        "weight_scale": np.full((rows, columns // GROUP), 0.125, ml_dtypes.bfloat16),
        "weight_shape": np.array([rows, columns], np.int64),
    }


def _nvfp4(rows: int, columns: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "weight_packed": generator.integers(0, 256, (rows, columns // 2)).astype(np.uint8),
        "weight_scale": np.full((rows, columns // GROUP), 0.5, ml_dtypes.float8_e4m3fn),
        "weight_global_scale": np.full(1, 3, np.float32),
    }


def _mxfp4(rows: int, columns: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    scales = np.full((rows, columns // GROUP), 125, np.uint8)
    return {"weight_packed": generator.integers(0, 256, (rows, columns // 2)).astype(np.uint8), "weight_scale": scales}


def _mxfp8(rows: int, columns: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    codes = generator.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": np.full((rows, columns // GROUP), 125, np.uint8)}


def _int8(rows: int, columns: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    codes = generator.integers(-127, 128, (rows, columns)).astype(np.int8)
    return {"weight": codes, "SCB": np.full(rows, 0.5, np.float32), "weight_format": np.zeros((), np.uint8)}


_PARTS = {"compressed": _int4, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "mxfp8": _mxfp8, "int8": _int8}


def _packed(weights: dict[str, np.ndarray], method: str) -> dict[str, np.ndarray]:
    result, generator = {}, np.random.default_rng(9)
    for name, value in weights.items():
        if "_proj.weight" not in name:
            result[name] = value
            continue
        rows, columns = value.shape
        module, groups = name.removesuffix(".weight"), columns // GROUP

        if method in _PARTS or method == "mixed":
            own = method if method != "mixed" else "nvfp4" if rows == columns else "compressed"
            result |= {f"{module}.{part}": v for part, v in _PARTS[own](rows, columns, generator).items()}
            continue
        shape = (columns // PER_WORD, rows) if method == "gptq" else (columns, rows // PER_WORD)
        result[f"{module}.qweight"] = _words(generator, *shape)
        result[f"{module}.qzeros"] = _words(generator, groups, rows // PER_WORD)
        result[f"{module}.scales"] = np.full((groups, rows), 0.125, np.float16)
        if method == "gptq":
            result[f"{module}.g_idx"] = (np.arange(columns) // GROUP).astype(np.int32)
    return result


def _with_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    result = {}
    for name, value in weights.items():
        head, dot, part = name.partition(".mlp.")
        for expert in range(EXPERTS if dot else 0):
            result[f"{head}.mlp.experts.{expert}.{part}"] = value
        if not dot:
            result[name] = value
    result["model.layers.0.mlp.gate.weight"] = np.eye(EXPERTS, HIDDEN).astype(ml_dtypes.bfloat16)
    return result


def _command(rng: Random) -> list[str]:
    if rng.random() < 0.75:
        return [*GENERATE, "x"]
    return [*FINETUNE, "--max-steps", "1", "--target-modules", rng.choice(("all-linear", "q_proj", "down_proj"))]


def _changed(rng: Random, files: Files, own: str, chance: float) -> Files:
    """config.json with `own` changed, or its weights. chance: of the first."""
    name = "model/config.json"
    config, weights = files[name], files["model/model.safetensors"]
    assert isinstance(config, bytes) and isinstance(weights, bytes)
    if rng.random() > chance:
        if rng.random() < 0.4:
            return {"model/model.safetensors": replace_values(rng, weights)}
        return {"model/model.safetensors": mutate_safetensors(rng, weights)}
    value = json.loads(config)
    if own in value and rng.random() < 0.7:
        changed = mutate_json(rng, dump(value[own]))
        marked = dump(value | {own: "\u2042"})
        return {name: marked.replace(json.dumps("\u2042").encode(), changed)}
    return {name: mutate_json(rng, config)}


def packed_case(rng: Random, groups: dict[str, Files]) -> Case:
    """Codes, scales, zero points and groups of columns; and what config.json says of them."""
    method = rng.choice(sorted(_QUANTIZATION))
    return Case(_command(rng), [method, "data"], _changed(rng, groups[method], "quantization_config", 0.5))


def experts_case(rng: Random, groups: dict[str, Files]) -> Case:
    """A router and its experts; how many there are, and how many a token takes."""
    files = groups["experts"]
    if rng.random() < 0.4:
        text = files["model/config.json"]
        assert isinstance(text, bytes)
        config = json.loads(text)
        for name in rng.sample([n for n in config if "expert" in n or "sparse" in n or "moe" in n or "mlp" in n], 1):
            config[name] = rng.choice((0, 1, 3, -1, 2**40, 0.5, [0], [5], True, hostile(rng)))
        return Case(_command(rng), ["experts", "data"], {"model/config.json": write_json(rng, config)})
    return Case(_command(rng), ["experts", "data"], _changed(rng, files, "num_experts", 0.3))
