"""Latent attention in GGUF files of `deepseek2`, `mistral4` and `minicpm3`.

`mistral4` and newer files of `deepseek2` split kv_b_proj by head into keys, which are transposed, and values.

Source: github.com/ggml-org/llama.cpp, its converter's DeepseekV2Model and MiniCPM3Model, src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import GgufEntry
from wgrad.train.files.gguf_traits import TRAITS
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.gguf_linear import write_key_heads
from wgrad.train.model.latent_attention import KV_B
from wgrad.train.model.model_config import ModelConfig

K_B, V_B = "self_attn.k_b_proj", "self_attn.v_b_proj"
BY_HEAD_PARTS = (f"{K_B}.weight", f"{V_B}.weight")
_LENGTHS = ("head_count", "head_count_kv", "key_length", "value_length", "key_length_mla", "value_length_mla")
LENGTHS = tuple(
    f"{name}.attention.{key}" for name, own in TRAITS.items() if own.splits_kv_b for key in _LENGTHS
)  # written by `write_heads`; newer files differ from older ones in these
# Layers, and vocabulary or 0 for any, by which llama.cpp recognizes models without q_lora_rank.
_PLAIN_QUERIES = ((26, 0), (27, 0), (48, 128_256))


def kv_b_rows(config: ModelConfig, name: str) -> dict[str, np.ndarray]:
    """Return the rows of a kv_b_proj that each of its tensors in GGUF has, by name; {} if GGUF does not split it."""
    c = config.latent
    if c is None or not name.endswith(f"{KV_B}.weight") or not config.gguf_traits.splits_kv_b:
        return {}
    rows = np.arange(config.num_attention_heads * (c.plain + c.value)).reshape(config.num_attention_heads, -1)
    owner = name.removesuffix(f"{KV_B}.weight")
    both = {K_B: rows[:, : c.plain], V_B: rows[:, c.plain :]}
    return {f"{owner}{part}.weight": own.reshape(-1) for part, own in both.items()}


def by_head(config: ModelConfig, name: str, value: np.ndarray) -> np.ndarray:
    """Return rows selected by `kv_b_rows` in GGUF's layout: keys [heads, rank, k], values [heads, v, rank].

    Other tensors are returned unchanged.
    """
    if not name.endswith(BY_HEAD_PARTS):
        return value
    value = value.reshape(config.num_attention_heads, -1, value.shape[-1])
    return value.swapaxes(1, 2) if K_B in name else value


def shape_by_head(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `by_head`'s result for a value of `shape`."""
    return by_head(config, name, np.broadcast_to(np.float32(0), shape)).shape


@dataclass(frozen=True)
class KvBEntry(GgufEntry):
    """The weight of kv_b_proj, joined from keys and values.

    It is decoded, because quantized blocks run along the rows of one part and along the columns of the other.
    """

    keys: GgufEntry = field(repr=False)
    values: GgufEntry = field(repr=False)

    def array(self) -> np.ndarray:
        parts = [self.keys.array().swapaxes(1, 2), self.values.array()]
        dtype = parts[0].dtype if parts[0].dtype == parts[1].dtype else np.float32
        return np.concatenate([part.astype(dtype) for part in parts], axis=1).reshape(self.shape)

    def sample(self, count: int, size: int) -> list[bytes]:
        return [*self.keys.sample(count, size), *self.values.sample(count, size)]


def with_kv_b(entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """Replace the entries of keys and values by one for kv_b_proj, for layers whose files have both."""
    c, heads = config.latent, config.num_attention_heads
    for layer in range(config.num_hidden_layers if c else 0):
        assert c is not None
        names = [f"model.layers.{layer}.{part}.weight" for part in (K_B, V_B)]
        k, v = (entries.get(name) for name in names)
        whole = f"model.layers.{layer}.{KV_B}.weight"
        if not isinstance(k, GgufEntry) or not isinstance(v, GgufEntry):
            continue
        if whole not in entries:
            if (k.shape, v.shape) != ((heads, c.rank, c.plain), (heads, c.value, c.rank)):
                continue  # `ModelFiles.check` refuses this file
            dtype = k.stored if k.stored == v.stored and k.stored in ("F16", "BF16") else "F32"
            shape = (heads * (c.plain + c.value), c.rank)
            fields = (k.source, k.path, whole, dtype, shape, None, None, dtype, k.offset, k.size + v.size, 0)
            entries[whole] = KvBEntry(*fields, k, v)
        for name in names:
            del entries[name]


# ---- keys ------------------------------------------------------------------------------------------
def write_heads(writer: Any, config: ModelConfig) -> None:
    """Write the number and sizes of heads.

    Latent attention is written as in newer files, with one head of keys that is the token's latent.
    """
    c = config.latent
    if not config.any_attends:
        writer.add_head_count(0)
        return
    writer.add_head_count(list(config.heads) or config.num_attention_heads)
    if c is None:
        write_key_heads(writer, config)
        widths = (config.head_dim, config.head_dim)
    elif config.gguf_traits.splits_kv_b:
        writer.add_head_count_kv(1)
        widths = (c.rank + c.rotated, c.rank)
        writer.add_key_length_mla(c.width)
        writer.add_value_length_mla(c.value)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        widths = (c.width, c.value)
    for add, width in zip((writer.add_key_length, writer.add_value_length), widths):
        add(width)


def write_latent(writer: Any, config: ModelConfig) -> None:
    """Write the keys that only models with latent attention have."""
    c = config.latent
    if c is None:
        return
    if c.query_rank:
        writer.add_q_lora_rank(c.query_rank)
    writer.add_kv_lora_rank(c.rank)
    if config.experts is None and config.gguf_traits.splits_kv_b:  # llama.cpp requires these keys
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        writer.add_expert_weights_scale(1.0)
    if config.rope.type == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * _all_dims(config))  # llama.cpp's converter writes a tenth
        if config.gguf_traits.states_growth:
            writer.add_attn_temperature_scale(config.query_growth)
            writer.add_attn_temperature_length(config.query_length)


def _all_dims(config: ModelConfig) -> float:
    """Return mscale_all_dim of the rotary embedding, or 0 if it has none."""
    rope = config.rope
    return 0.0 if rope.factor <= 1 else (math.sqrt(rope.score_factor) - 1) / (0.1 * math.log(rope.factor))


def without_latent_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of a model with latent attention that GGUF has no key for."""
    c, rope, traits = config.latent, config.rope, config.gguf_traits
    if c is None:
        return
    if rope.type == "yarn" and (not traits.splits_kv_b or not _all_dims(config) or rope.attention_factor != 1):
        yield "yarn scaling with mscale other than mscale_all_dim"
    if rope.type == "yarn" and traits.states_growth and not math.isclose(_all_dims(config), 1, rel_tol=1e-6):
        yield "mscale_all_dim other than 1"
    if not config.interleaved and traits.splits_kv_b:
        yield "rope_interleave false"
    sizes = (config.num_hidden_layers, 0), (config.num_hidden_layers, config.vocab_size)
    if traits.splits_kv_b and any(size in _PLAIN_QUERIES for size in sizes) == bool(c.query_rank):
        yield f"{'a' if c.query_rank else 'no'} q_lora_rank with {config.num_hidden_layers} layers"
    if traits.scales is not None:
        embedding, depth, base = traits.scales
        own = (config.embedding_scale, config.residual_scale, config.logit_scale)
        usual = (embedding, depth / math.sqrt(config.num_hidden_layers), base / config.hidden_size)
        if not np.allclose(own, usual, rtol=1e-6):
            yield "scale_emb, scale_depth or dim_model_base other than MiniCPM3's"
        if not c.query_rank:
            yield "no q_lora_rank"
    if config.experts is not None and config.experts.groups > 1 and config.experts.groups_by_best:
        yield "groups of experts chosen by their best score"


def keys_of_latent(fields: GgufFields, heads: int) -> dict[str, Any]:
    """Return the config.json keys of latent attention, or {} if the model has none."""
    prefix = fields.architecture + "."
    if prefix + "attention.kv_lora_rank" not in fields:
        return {}
    lengths = "attention.key_length", "attention.value_length"
    ending = "_mla" if prefix + "attention.key_length_mla" in fields else ""
    width = fields.needed(prefix + lengths[0] + ending, int)
    value = fields.get(prefix + lengths[1] + ending, int, fields.needed(prefix + "embedding_length", int) // heads)
    rotated = fields.needed(prefix + "rope.dimension_count", int)
    if not 0 < rotated < width:
        raise fields.error(prefix + "rope.dimension_count", f"must be below the {width} of a head, got {rotated}")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": fields.get(prefix + "attention.q_lora_rank", int) or None,
        "kv_lora_rank": fields.needed(prefix + "attention.kv_lora_rank", int),
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def yarn_of_latent(fields: GgufFields, scaling: dict[str, Any] | None, latent: dict[str, Any]) -> dict[str, Any] | None:
    """Return `scaling`; for latent attention with yarn, add the mscale keys by which scores are scaled."""
    key = fields.architecture + ".rope.scaling.yarn_log_multiplier"
    if not latent or scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    all_dims = 1.0 if fields.traits.states_growth else round(10 * fields.needed(key, float), 6)  # as in llama.cpp
    scaling = scaling | {"mscale": all_dims, "mscale_all_dim": all_dims}
    if fields.traits.states_growth:
        key = f"{fields.architecture}.attention.temperature_length"
        length: int = scaling.get("original_max_position_embeddings", 0)
        if fields.get(key, int, length) != length:
            raise fields.error(key, f"must be the original length, {length}")
        scaling["llama_4_scaling_beta"] = fields.get(key.replace("length", "scale"), float, 0.0)
    return scaling
