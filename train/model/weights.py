"""The tensors that a model has: names, shapes, kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wgrad.train.model.model_config import ModelConfig

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class WeightSpec:
    """A tensor that the architecture has. kind: embedding, head, projection, norm or bias. offset: what the
    model's value is above the file's."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: float = 0.0


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of a layer's projections, by their path within the layer."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    if config.fused:
        return {
            "self_attn.qkv_proj": (config.q_size + 2 * config.kv_size, hidden),
            "self_attn.o_proj": (hidden, config.q_size),
            "mlp.gate_up_proj": (2 * ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
    return {
        "self_attn.q_proj": (config.q_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.q_size),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every tensor of the model, in the order in which it is computed."""
    specs = [WeightSpec(EMBEDDING, (config.vocab_size, config.hidden_size), "embedding")]
    for layer in range(config.num_hidden_layers):
        specs.extend(_layer_specs(config, f"model.layers.{layer}."))
    specs.append(_norm(config, FINAL_NORM, config.hidden_size))
    if not config.tie_word_embeddings:
        specs.append(WeightSpec(HEAD, (config.vocab_size, config.hidden_size), "head"))
    return specs


def _norm(config: ModelConfig, name: str, width: int) -> WeightSpec:
    return WeightSpec(name, (width,), "norm", config.norm_offset)


def _layer_specs(config: ModelConfig, prefix: str) -> Iterator[WeightSpec]:
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias, "o_proj": config.o_bias}
    for norm in (config.attention_norm, config.attention_out_norm, config.mlp_norm, config.mlp_out_norm):
        if norm:
            yield _norm(config, f"{prefix}{norm}.weight", config.hidden_size)
    if config.qk_norm:
        for norm, width in (("self_attn.q_norm", config.q_size), ("self_attn.k_norm", config.kv_size)):
            yield _norm(config, f"{prefix}{norm}.weight", width if config.qk_norm_whole else config.head_dim)
    for module, shape in projection_shapes(config).items():
        yield WeightSpec(f"{prefix}{module}.weight", shape, "projection")
        if biased.get(module.rpartition(".")[2], config.mlp_bias):
            yield WeightSpec(f"{prefix}{module}.bias", shape[:1], "bias")
