"""Read config.json into a ModelConfig.

The files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) are accepted. config_file.py has the
types, ranges and defaults of their keys, families.py how each family differs from Llama.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import convert, read_json, show
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.model.config_file import NameFile, check_heads, refuse_unsupported
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.latent_attention import LatentAttention
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.multimodal import MULTIMODAL, text_config
from wgrad.train.model.quantized_keys import fp8_block, nf4, packing_of
from wgrad.train.model.rope_scaling import parse_ropes

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
# Files with another one do not use the last.
_ACTIVATION_KEYS = ("hidden_activation", "mlp_hidden_act", "activation", "activation_function", "hidden_act")
_USUAL = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration")


def load_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read the configuration in `folder`/config.json.

    Raises:
        WgradError: The file is missing or not JSON, a value is out of range, or the model is not supported.
    """
    path = Path(folder) / "config.json"
    if not exists(path, "--model"):
        raise WgradError(f"--model: {folder} has no config.json: give the folder of a model in Hugging Face layout")
    return parse_model_config(read_json(path, dict[str, Any], "--model", from_python=True), f"--model: {path}")


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Return the configuration in the mapping of a config.json. `where` begins each error."""
    name = _architecture(convert(raw, NameFile, where), where)
    if name in MULTIMODAL:
        whole, given = MULTIMODAL[name], text_config(raw, name, where)
        text = parse_model_config(given, f"{where}: text_config")
        if text.experts is not None:
            asked = given.get("router_aux_loss_coef") if given.get("output_router_logits") else 0.0
            balance = text.experts.balance or asked or 0.0 if whole.balanced else 0.0
            files = whole.experts_files or text.experts.files
            text = replace(text, experts=replace(text.experts, files=files, balance=balance))
        return replace(text, text_of=name)
    family = FAMILIES[name]
    if raw.get("rope_scaling") == {}:  # which transformers ignores
        raw = {**raw, "rope_scaling": None}
    file = convert(raw, family.keys, where)
    layers, (heads, kv_heads, head_dim) = file.num_hidden_layers, file.attention_sizes
    variant: dict[str, Any] = {"windows": (0,) * layers, "use_rope": (True,) * layers}
    variant |= {"hidden_act": file.hidden_act, "rms_norm_eps": file.rms_norm_eps}
    variant |= family.variant(file)
    refuse_unsupported(raw, file, where, _built(variant))
    if variant.get("experts") is not None:
        variant["experts"] = replace(variant["experts"], balance=file.balance)
    key = next(key for key in _ACTIVATION_KEYS if key in file.__struct_fields__)
    variant["hidden_act"] = _activation(variant["hidden_act"], variant.get("gated", True), f"{where}: {key}")
    latent: LatentAttention | None = variant.get("latent")
    head_dim = latent.width if latent else head_dim
    head_dims, all_kv_heads = variant.get("head_dims") or (head_dim,), variant.get("kv_heads") or (kv_heads,)
    for width, groups in dict.fromkeys(((head_dim, kv_heads), *zip(head_dims, all_kv_heads))):
        check_heads(heads, groups, width, where)
    rotated = (latent.rotated,) if latent else head_dims
    rope, variant["local_rope"] = parse_ropes(file, *_rotated_dims(variant["windows"], rotated), where)
    if latent is not None:
        variant["score_scale"] = head_dim**-0.5 * rope.score_factor
    return ModelConfig(
        architecture=name,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=variant.pop("intermediate_size", file.intermediate_size),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=file.max_position_embeddings,
        tie_word_embeddings=file.tie_word_embeddings,
        rope=rope,
        extra_layers=variant.pop("extra_layers", file.num_nextn_predict_layers or 0),
        quantization=nf4(file.quantization_config, where),
        fp8_block=fp8_block(file.quantization_config, where),
        packing=packing_of(file.quantization_config, where),
        dropouts=file.asked_dropouts(raw),
        **variant,
    )


def _built(variant: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values of keys by which files state what a model with these fields has (Qwen3-Coder, Command R7B)."""
    found = {"use_qk_norm": (True,)} if variant.get("qk_norm") else {}
    return found | ({"position_embedding_type": ("rope_gptj",)} if variant.get("interleaved") else {})


def _architecture(file: NameFile, where: str) -> str:
    """Return the architecture of a config.json, by `model_type` as in transformers, or else by `architectures`.

    Raises:
        WgradError: The architecture is not supported.
    """
    names = file.architectures or []
    by_type = {kind: name for name, family in FAMILIES.items() for kind in (family.model_type, *family.other_types)}
    by_type |= {kind: name for name, whole in MULTIMODAL.items() for kind in (whole.model_type, *whole.other_types)}
    if file.model_type is not None:
        found = by_type.get(file.model_type)
    else:
        found = next((name for name in names if name in by_type.values()), None)
    if found is None:
        what = [f"model_type {show(file.model_type)}"] if file.model_type is not None or not names else []
        what += [f"architecture {one_line(', '.join(names))}"] if names else []
        usual = ", ".join(_USUAL)
        raise WgradError(
            f"{where}: {', '.join(what)} is not supported: use a model of {usual} or another of the {len(by_type)} "
            "architectures that docs/reference/models.md lists"
        )
    return found


def _rotated_dims(windows: Sequence[int], head_dims: Sequence[int]) -> tuple[int, int]:
    """Return the head_dim of layers without a window and of those with one, or the first layer's if there are none."""
    dims = {window > 0: width for window, width in zip(windows, head_dims)}
    return dims.get(False, head_dims[0]), dims.get(True, head_dims[0])


def _activation(name: str, gated: bool, where: str) -> str:
    known = [key for key in _ACTIVATIONS if not (gated and key == "xielu")]
    if name not in known:
        raise WgradError(f"{where} {show(name)} is not supported: {', '.join(known)} are")
    return _ACTIVATIONS[name]
