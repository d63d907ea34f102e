"""The storage type of each tensor in a GGUF file, by the mixes of llama.cpp's llama-quantize.

A mix keeps more bits where errors cost most: in the output layer, and in some layers' value and down projections.
Source: src/llama-quant.cpp (github.com/ggml-org/llama.cpp), commit 007dbbf. Files written here have no fused attn_qkv.
"""

from __future__ import annotations

import re

from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.train.model.linear_attention import GatedConvolution
from wgrad.train.model.mamba_sizes import Mamba1, Mamba2
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.options.choices import GGUF_MIXES

MIXES = {mix: mix.upper().removesuffix("_M") for mix in GGUF_MIXES}  # type of most tensors by mix
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # if rows are not whole blocks
_WITH_MINIMUM = {"q4_0": "Q4_1", "q5_0": "Q5_1"}  # for the first down projections, with an importance matrix
# Attention of models with 8 experts gets more bits, since most of the weights are in the experts.
_ATTENTION_OF_EIGHT = {"attn_v": "Q8_0", "attn_k": "Q8_0", "attn_output": "Q5_K"}
_KEPT = ("altup", "laurel", "per_layer_model_proj")  # parts of names of tensors that are never quantized
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def stored_type(config: ModelConfig, mix: str, name: str, width: int, tied: bool, important: bool = False) -> str:
    """Return the storage type of a matrix.

    Args:
        mix: Key of MIXES.
        name: GGUF's name of the tensor.
        width: Elements of a row.
        tied: Whether the file has no output layer of its own.
        important: Whether there is an importance matrix.
    """
    usual = MIXES[mix]
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        found = _of_output(usual, width)
    elif name == "token_embd.weight":
        found = "Q8_0" if mix == "mxfp4" else usual
    elif any(part in name for part in _KEPT):
        found = "F16"
    else:
        found = _of_layer(config, mix, name, important)
    if found != "F16" and width % gguf_formats()[found].block:
        found = _FALLBACKS.get(found, "F16")
    return found if found == "F16" or width % gguf_formats()[found].block == 0 else "F16"


def _of_output(usual: str, width: int) -> str:
    if usual in ("Q8_0", "MXFP4") or width % gguf_formats()[usual].block:
        return "Q8_0"
    return "Q6_K"


def _of_layer(config: ModelConfig, mix: str, name: str, important: bool) -> str:
    usual, place = MIXES[mix], _LAYER.fullmatch(name)
    if place is None:
        return usual
    part = place[2]
    layer, layers = _place(config, part, int(place[1]))
    first = layer < layers // 8
    many = first or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    medium = mix in ("q4_k_m", "q5_k_m")
    if config.experts is not None and config.experts.count == 8 and part in _ATTENTION_OF_EIGHT:
        return _ATTENTION_OF_EIGHT[part] if part != "attn_output" or mix in ("q4_k_m", "iq4_xs") else usual
    if part == "attn_v":
        if mix == "iq4_xs" and config.num_attention_heads >= 4 * config.num_key_value_heads:
            return "Q5_K"
        if medium and many:
            return "Q6_K"
        if usual == "Q4_K" and _is_70b(config):
            return "Q5_K"
    elif part in ("ffn_down", "ffn_down_exps"):
        if mix == "iq4_xs" and first and not important:
            return "Q5_K"
        if mix in _WITH_MINIMUM and first and important:
            return _WITH_MINIMUM[mix]
        if medium and many:
            return "Q6_K"
    return usual


def _place(config: ModelConfig, part: str, layer: int) -> tuple[int, int]:
    """Return the index by which llama.cpp counts a tensor's layer, and the number of layers that it counts."""
    layers = config.num_hidden_layers
    if part == "attn_v" and isinstance(config.linear, Mamba1 | Mamba2 | GatedConvolution):
        attends = [config.attends(i) for i in range(layers)]
        return sum(attends[:layer]), sum(attends)
    return (sum(config.mlp_layers[:layer]) if part == "ffn_down" and config.mlp_layers else layer), layers


def _is_70b(config: ModelConfig) -> bool:
    """Return whether llama.cpp treats it as a 70B model, where eight query heads share a small value projection."""
    grouped = config.num_attention_heads != config.num_key_value_heads
    return config.num_hidden_layers == 80 and config.gguf_traits.sized_70b[grouped]
