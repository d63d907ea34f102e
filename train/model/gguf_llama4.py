"""GGUF files of Llama 4, most of whose properties are fixed in llama.cpp.

Source: github.com/ggml-org/llama.cpp, its converter's Llama4Model, src/models/llama4.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.model.model_config import ModelConfig

_CHUNK, _GROWTH, _LENGTH = 8192, 0.1, 8192  # of attention; of queries in layers without rotary embeddings
_UNNORMED = 128  # experts of the model without norms of heads
_WINDOW = "attention.sliding_window"


def write_llama4(writer: Any, config: ModelConfig) -> None:
    """Write which layers have experts: every N-th."""
    if config.gguf_traits.chunked and config.experts is not None:
        writer.add_interleave_moe_layer_step(config.experts.layers.index(True) + 1)


def without_llama4_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties that differ from llama.cpp's fixed values."""
    if not config.gguf_traits.chunked:
        return
    if config.experts is None:
        yield "no layer with experts"
        return
    step = config.experts.layers.index(True) + 1
    if config.experts.layers != tuple((i + 1) % step == 0 for i in range(config.num_hidden_layers)):
        yield "experts in other layers than every N-th"
    if config.qk_norm != (config.experts.count != _UNNORMED):
        yield f"{'' if config.qk_norm else 'no '}norms of heads with {config.experts.count} experts"
    last = config.max_position_embeddings  # what begins beyond it makes no difference
    if min(config.chunk or last, last) != min(_CHUNK, last) or config.chunked != config.use_rope:
        yield f"attention in chunks of {config.chunk} tokens, or in other layers than those with rotary embeddings"
    growth, length = config.plain_growth
    if (growth, length) != (_GROWTH, _LENGTH) and (last >= _LENGTH or (growth and last >= length)):
        yield f"queries that grow by {growth:g} after {length} positions"


def keys_of_llama4(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Return the config.json keys of Llama 4. count, chosen: number of experts in a layer, and for a token."""
    prefix = fields.architecture + "."
    if fields.get(prefix + _WINDOW, int, _CHUNK) != _CHUNK:
        raise fields.error(prefix + _WINDOW, f"must be {_CHUNK}, or left out: other chunks are not supported")
    return {
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "intermediate_size": fields.needed(prefix + "expert_feed_forward_length", int),
        "intermediate_size_mlp": fields.needed(prefix + "feed_forward_length", int),
        "interleave_moe_layer_step": fields.needed(prefix + "interleave_moe_layer_step", int),
        "moe_layers": None,
        "use_qk_norm": count != _UNNORMED,
        "no_rope_layer_interval": fields.traits.one_unrotated_of,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "attn_scale": _GROWTH,
        "floor_scale": _LENGTH,
    }
