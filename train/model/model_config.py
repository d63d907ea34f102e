"""Configuration of a decoder in one frozen dataclass, which load_config.py makes of config.json.

Field names are Hugging Face's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from wgrad.train.files.gguf_traits import GgufTraits, traits_of
from wgrad.train.files.packed_files import Packing
from wgrad.train.model.alibi import FURTHER
from wgrad.train.model.altup import AltUp
from wgrad.train.model.config_file import QuantizationFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.latent_attention import LatentAttention
from wgrad.train.model.linear_attention import GatedConvolution, LinearAttention
from wgrad.train.model.mamba_sizes import Mamba1, Mamba2
from wgrad.train.model.multimodal import MULTIMODAL
from wgrad.train.model.per_layer import PerLayer
from wgrad.train.model.rope_scaling import RopeConfig

Mixer = LinearAttention | GatedConvolution | Mamba1 | Mamba2  # replaces attention in a layer, or runs alongside it


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and variants of a decoder. The defaults are those of Llama.

    Attributes:
        windows: Sliding window of each layer in tokens, 0 for none.
        use_rope: Whether each layer has rotary embeddings.
        rope, local_rope: Rotary embeddings, and those of layers with a window if they differ.
        alibi: Whether scores have a term for each head that grows with the key's position, in keys' further elements.
        interleaved: Whether element 2 i of a head is rotated with element 2 i + 1.
        attention_norm, mlp_norm: Names within a layer of the norms before attention and MLP.
        attention_out_norm, mlp_out_norm: Names of the norms of their outputs, "" for none.
        norms_dense_out: Whether layers without experts have mlp_out_norm too.
        norms_stream: Whether these norms are of the stream, with the output added, instead.
        embedding_width: Width of embeddings and head, which projections lead from and to; 0: hidden_size.
        layer_norm: Whether norms, except those of heads, are LayerNorm. rms_norm_eps is their epsilon too.
        norm_weight, norm_bias: Whether norms have weights, and LayerNorm biases.
        norm_offset: Number to add to the norms' weights in files.
        embedding_norm: Whether the embeddings are normed, without weights.
        position_table: Path of embeddings of positions, which are added to those of tokens, or "".
        position_offset: Row of that table for the first position.
        transposed: Whether files have the projections as [in, out].
        q_norm, k_norm, o_proj, gate_proj, up_proj, down_proj: Paths within a layer.
        attention: Path of the module with q_proj, k_proj and v_proj.
        fused: Whether q, k and v are one projection, and gate and up another.
        qkv_proj: Path of a projection of q, k and v in one, or "".
        qkv_by_heads: Whether its rows are those of each key head's queries, the key and the value, head by head.
            Otherwise they are those of all queries, all keys and all values.
        gate_up_proj: Path of a projection of gate and up in one, or "".
        qk_norm_whole: Whether q and k are normed over all heads at once.
        qk_norm_last: Whether q and k are normed after their rotation.
        qk_norm_weight: Whether these norms have weights. Without weights, only layers with rotary embeddings have them.
        qk_layer_norm: Whether these norms are LayerNorm, with a bias unless each head has a weight.
        qk_norm_heads: Whether each head has a weight of its own.
        qk_norm_apart: Whether files have each head's weight as a tensor.
        value_norm: Whether each head's values are normed, without weights.
        score_scale: Factor of the scores before the softmax; 0 means head_dim ** -0.5.
        score_scale_by_layer: Whether the scores of the first layer are divided by 1, of the second by 2, and so on.
        score_softcap, logit_softcap: A soft cap c replaces x by c tanh(x / c); 0 means none.
        query_growth, query_length: Queries at position p are scaled by
            1 + query_growth log(1 + floor(p / query_length)), in attention to latents the unrotated part too.
        sinks: Whether each head has the score of an additional key without a value.
        clip_qkv: q, k and v are clipped to -clip_qkv and clip_qkv, after their norms; 0 means not at all.
        attention_gate: Whether q_proj has a gate of attention's output after each head's queries.
        attention_gate_proj: Path of a projection for such a gate, or "".
        gate_of_heads: Whether that projection has a single number for each head.
        gate_softplus: Whether the gate's factor is a softplus instead of a sigmoid.
        keys_as_values: Whether each layer uses k_proj's output as values too and has no v_proj.
        kv_sources: Index of the layer whose keys and values each layer uses; () if all use their own.
        latent: Sizes of multi-head latent attention, in all layers. head_dim is then that of queries and keys.
        gated: Whether the MLP multiplies up by the activation of gate. Otherwise it is the activation of up.
        parallel: Whether attention and MLP read the same residual stream, to which both are added. They share a norm if
            attention_norm is mlp_norm.
        linear: Sizes of linear attention, Mamba or a convolution, which layers have instead of attention.
        experts: Sizes of the experts, which layers have instead of an MLP.
        mixing_layers, mlp_layers: Whether each layer has attention or its replacement, and an MLP; () means all.
        heads, head_dims, kv_heads, mlp_widths: Sizes of each layer, if they differ.
        per_layer: Embeddings of each layer.
        altup: Several streams, LAuReL and sparse activations.
        embedding_scale, logit_scale, residual_scale: Factors of embeddings, logits, and terms of the residual stream.
        attention_in_scale, attention_out_scale, gate_scale, down_scale: Factors of attention's input and output, of
            gate_proj's output, and of the MLP's output.
        layer_scale: Whether a layer's output is scaled by its layer_scalar, which is never trained.
        chunk, chunked: Length of the chunks in which some layers attend (chunks.py), and these layers; 0: none do.
        plain_growth: Growth and length of `chunks.growth_by_position`, for layers without rotary embeddings.
        quantization: Options of the files' quantization, if bitsandbytes stored the weights in NF4.
        embedding: Path of the embedding in transformers' model.
        file_names: Beginnings of tensors' names, each with those in files, of which the first is written.
        text_of: Multimodal architecture of which this is the text model, or "".
        extra_layers: Number of multi-token prediction layers that files may have, which are ignored.
        fp8_block, packing: Storage of the files' quantized weights.
        dropouts: Keys of config.json that ask for dropout in training, with their values. It is not applied.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"  # or another value of load_config._ACTIVATIONS
    windows: tuple[int, ...]
    use_rope: tuple[bool, ...]
    rope: RopeConfig
    quantization: QuantizationFile | None = None
    # The fields below are not part of `repr`, which identifies models of older checkpoints: see `identity`.
    attention_norm: str = field(default="input_layernorm", repr=False)
    attention_out_norm: str = field(default="", repr=False)
    mlp_norm: str = field(default="post_attention_layernorm", repr=False)
    mlp_out_norm: str = field(default="", repr=False)
    norms_dense_out: bool = field(default=True, repr=False)
    norms_stream: bool = field(default=False, repr=False)
    embedding_width: int = field(default=0, repr=False)
    norm_offset: float = field(default=0.0, repr=False)
    embedding_scale: float = field(default=1.0, repr=False)
    score_scale: float = field(default=0.0, repr=False)
    score_scale_by_layer: bool = field(default=False, repr=False)
    score_softcap: float = field(default=0.0, repr=False)
    logit_softcap: float = field(default=0.0, repr=False)
    logit_scale: float = field(default=1.0, repr=False)
    residual_scale: float = field(default=1.0, repr=False)
    qk_norm_whole: bool = field(default=False, repr=False)
    fused: bool = field(default=False, repr=False)
    local_rope: RopeConfig | None = field(default=None, repr=False)
    layer_norm: bool = field(default=False, repr=False)
    parallel: bool = field(default=False, repr=False)
    gated: bool = field(default=True, repr=False)
    head_bias: bool = field(default=False, repr=False)
    final_norm: str = field(default="model.norm", repr=False)
    norm_weight: bool = field(default=True, repr=False)
    norm_bias: bool = field(default=True, repr=False)
    embedding_norm: bool = field(default=False, repr=False)
    qk_norm_last: bool = field(default=False, repr=False)
    qk_norm_weight: bool = field(default=True, repr=False)
    qk_layer_norm: bool = field(default=False, repr=False)
    qk_norm_heads: bool = field(default=False, repr=False)
    qk_norm_apart: bool = field(default=False, repr=False, compare=False)
    chunk: int = field(default=0, repr=False)
    chunked: tuple[bool, ...] = field(default=(), repr=False)
    plain_growth: tuple[float, int] = field(default=(0.0, 1), repr=False)
    alibi: bool = field(default=False, repr=False)
    interleaved: bool = field(default=False, repr=False)
    query_growth: float = field(default=0.0, repr=False)
    query_length: int = field(default=0, repr=False)
    sinks: bool = field(default=False, repr=False)
    clip_qkv: float = field(default=0.0, repr=False)
    q_norm: str = field(default="self_attn.q_norm", repr=False)
    k_norm: str = field(default="self_attn.k_norm", repr=False)
    qkv_proj: str = field(default="", repr=False)
    qkv_by_heads: bool = field(default=True, repr=False)
    position_table: str = field(default="", repr=False)
    position_offset: int = field(default=0, repr=False)
    transposed: bool = field(default=False, repr=False, compare=False)
    gate_up_proj: str = field(default="", repr=False)
    o_proj: str = field(default="self_attn.o_proj", repr=False)
    gate_proj: str = field(default="mlp.gate_proj", repr=False)
    up_proj: str = field(default="mlp.up_proj", repr=False)
    down_proj: str = field(default="mlp.down_proj", repr=False)
    linear: Mixer | None = field(default=None, repr=False)
    mixing_layers: tuple[bool, ...] = field(default=(), repr=False)
    mlp_layers: tuple[bool, ...] = field(default=(), repr=False)
    attention: str = field(default="self_attn", repr=False)
    attention_in_scale: float = field(default=1.0, repr=False)
    attention_out_scale: float = field(default=1.0, repr=False)
    gate_scale: float = field(default=1.0, repr=False)
    down_scale: float = field(default=1.0, repr=False)
    attention_gate: bool = field(default=False, repr=False)
    attention_gate_proj: str = field(default="", repr=False)
    gate_of_heads: bool = field(default=False, repr=False)
    gate_softplus: bool = field(default=False, repr=False)
    latent: LatentAttention | None = field(default=None, repr=False)
    experts: Experts | None = field(default=None, repr=False)
    heads: tuple[int, ...] = field(default=(), repr=False)
    head_dims: tuple[int, ...] = field(default=(), repr=False)
    kv_heads: tuple[int, ...] = field(default=(), repr=False)
    mlp_widths: tuple[int, ...] = field(default=(), repr=False)
    kv_sources: tuple[int, ...] = field(default=(), repr=False)
    keys_as_values: tuple[bool, ...] = field(default=(), repr=False)
    value_norm: bool = field(default=False, repr=False)
    layer_scale: bool = field(default=False, repr=False)
    per_layer: PerLayer | None = field(default=None, repr=False)
    altup: AltUp | None = field(default=None, repr=False)
    file_names: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False, compare=False)
    text_of: str = field(default="", repr=False)
    extra_layers: int = field(default=0, repr=False)
    embedding: str = field(default="model.embed_tokens", repr=False, compare=False)
    fp8_block: tuple[int, int] | None = field(default=None, repr=False, compare=False)
    packing: Packing | None = field(default=None, repr=False, compare=False)
    dropouts: tuple[tuple[str, float], ...] = field(default=(), repr=False, compare=False)

    @property
    def in_peft(self) -> str:
        """Prefix of the decoder's modules in transformers, and so in PEFT."""
        return MULTIMODAL[self.text_of].in_peft if self.text_of else FAMILIES[self.architecture].in_peft

    @property
    def table_width(self) -> int:
        """Width of embeddings and of the head's input."""
        return self.embedding_width or self.hidden_size

    def heads_of(self, layer: int) -> int:
        return self.heads[layer] if self.heads else self.num_attention_heads

    def head_dim_of(self, layer: int) -> int:
        return self.head_dims[layer] if self.head_dims else self.head_dim

    def key_width_of(self, layer: int) -> int:
        """Return the elements of a head in attention and in the cache, with ALiBi's."""
        return self.head_dim_of(layer) + (FURTHER if self.alibi else 0)

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads[layer] if self.kv_heads else self.num_key_value_heads

    def q_size_of(self, layer: int) -> int:
        return self.heads_of(layer) * self.head_dim_of(layer)

    def kv_size_of(self, layer: int) -> int:
        return self.kv_heads_of(layer) * self.head_dim_of(layer)

    def mlp_width_of(self, layer: int) -> int:
        """Return the width of a layer's MLP without experts."""
        return self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size

    def kv_source(self, layer: int) -> int:
        """Return the index of the layer whose keys and values a layer uses, in most models its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def score_scale_of(self, layer: int) -> float:
        """Return the factor of a layer's scores before the softmax."""
        scale = self.score_scale or self.head_dim_of(layer) ** -0.5
        return scale / (layer + 1) if self.score_scale_by_layer else scale

    def keys_of(self, layer: int) -> str:
        """Return which of the projections k and v a layer has: "kv", "k" or ""."""
        if self.kv_source(layer) != layer:
            return ""
        return "k" if self.keys_as_values and self.keys_as_values[layer] else "kv"

    def shares_keys(self, layer: int) -> bool:
        """Return whether a later layer uses this layer's keys and values."""
        return layer in self.kv_sources[layer + 1 :]

    @property
    def gguf(self) -> str:
        """llama.cpp's name of the architecture, or "" if GGUF files of it are not supported."""
        family = FAMILIES[self.architecture]
        others = (name for part, name in family.gguf_others if getattr(self, part) is not None)
        return next(others, family.gguf)

    @property
    def gguf_traits(self) -> GgufTraits:
        """The architecture's properties in llama.cpp."""
        return traits_of(self.gguf)

    def linear_of(self, layer: int) -> Mixer | None:
        """Return the operator that a layer has instead of attention or alongside it, or None."""
        return self.linear if self.linear is not None and self.linear.layers[layer] else None

    def mixes(self, layer: int) -> bool:
        """Return whether a layer has attention or an operator that replaces it."""
        return self.mixing_layers[layer] if self.mixing_layers else True

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        linear = self.linear_of(layer)
        return self.mixes(layer) and (linear is None or linear.alongside)

    @property
    def any_attends(self) -> bool:
        """True if any layer has attention."""
        return any(map(self.attends, range(self.num_hidden_layers)))

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return self.mlp_layers[layer] if self.mlp_layers else True

    def norms_of(self, layer: int) -> tuple[str, str, str, str]:
        """Return the names of a layer's norms, "" for none: attention's input and output, and the MLP's."""
        linear, normed = self.linear_of(layer), self.norms_dense_out or self.has_experts(layer)
        usual = (
            *((self.attention_norm, self.attention_out_norm) if self.mixes(layer) else ("", "")),
            *((self.mlp_norm, self.mlp_out_norm if normed else "") if self.has_mlp(layer) else ("", "")),
        )
        return usual if linear is None or linear.norms is None else linear.norms

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def mlp_width(self) -> int:
        """Elements of a token's activations in the widest MLP, with all chosen experts."""
        routed = self.experts.chosen * self.experts.width if self.experts else 0
        dense = max(self.mlp_widths, default=self.intermediate_size)
        if self.experts is not None and self.experts.norms is not None:
            return routed + dense
        return max(routed, dense if self.experts is None or not all(self.experts.layers) else 0)

    @property
    def positions(self) -> int:
        """Tokens that a sequence may have. With dynamic scaling, they are `factor` times max_position_embeddings."""
        factor = max(self.rope.factor, 1.0) if self.rope.type == "dynamic" else 1.0
        return int(factor * self.max_position_embeddings)

    @property
    def read_again_at(self) -> int:
        """Length in tokens at which generation refills its KV cache, or 0 for never.

        As in transformers, this concerns only Phi-3: keys rotated with the short factors do not fit the long ones.
        """
        beyond = self.rope.original_max_position_embeddings + 1
        return beyond if FAMILIES[self.architecture].reads_again and self.rope.type == "longrope" else 0

    def identity(self) -> str:
        """Return a text that only equal configurations share. Older checkpoints contain the same text."""
        changed = _later(self)
        return repr(self) + (repr(changed) if changed else "")


def _later(part: Any) -> dict[str, Any]:
    """Return the fields that `repr` leaves out, if they differ from their defaults."""
    changed = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if not f.repr and f.compare and value != f.default:
            changed[f.name] = value
        if is_dataclass(value) and (inside := _later(value)):
            changed[f"{f.name} too"] = inside
    return changed
