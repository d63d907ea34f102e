"""Configuration of a Llama-type model (config.json) in one frozen dataclass.

Accepts the files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Field names are Hugging Face's;
config_file.py has their types, ranges and defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, convert, read_json, show
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.files.packed_files import Packing
from wgrad.train.model.altup import AltUp
from wgrad.train.model.config_file import UNSUPPORTED, ConfigFile, NameFile, QuantizationFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.latent_attention import LatentAttention
from wgrad.train.model.linear_attention import GatedConvolution, LinearAttention
from wgrad.train.model.mamba_sizes import Mamba2
from wgrad.train.model.multimodal import MULTIMODAL, text_config
from wgrad.train.model.per_layer import PerLayer
from wgrad.train.model.quantized_keys import fp8_block, nf4, packing_of
from wgrad.train.model.rope_scaling import RopeConfig, parse_ropes

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
_USUAL = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration")
Mixer = LinearAttention | GatedConvolution | Mamba2  # what a layer has in the place of attention, or alongside it
_UNGATED = ("relu2", "xielu")  # activations that only MLPs without a gate have


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and variants of a decoder; defaults are a plain LLaMA's. `windows[i]`: layer i's sliding window (0: none);
    `use_rope[i]`: it rotates.

    A layer's norms by the names of their weights: before attention and MLP, and, where a family has such, of their
    outputs ("": none). norm_offset: the file's weight is the norm's less this. score_scale: of q k, before the softmax
    (0: head_dim ** -0.5). A soft-cap c makes x into c tanh(x / c), 0 leaves it. qk_norm_whole: q and k are normed over
    all their heads at once. residual_scale: of what is added to the residual stream. fused: q, k and v are one
    projection, gate and up another. local_rope: of layers with a window, where they rotate by their own.

    layer_norm: norms, but those of heads, are LayerNorm, with biases where norm_bias; rms_norm_eps is theirs.
    norm_weight: norms have weights. embedding_norm: the embeddings are normed, without weights. qk_norm_last: q and k
    are normed after they are rotated. qk_norm_weight: with weights; else in layers that rotate alone. longest: the
    tokens of a sequence that is computed as the model does (0: of any). interleaved: element 2 i of a head is rotated
    with 2 i + 1. query_growth b: queries at position p are scaled by 1 + b log(1 + floor(p / query_length)). sinks:
    each head has a score of a key without a value. clip_qkv c: q, k and v are kept within -c and c (0: not). parallel:
    attention and MLP of a layer read the same norm, and both are added to the stream. gated: the MLP multiplies up by
    what the activation makes of gate; else it is the activation of up. q_norm, o_proj, gate_proj, ...: their paths
    within a layer; gate_up_proj: of gate and up in one projection, if not "".
    linear: of layers that have linear attention or a convolution in the place of attention. attention_gate: q_proj has
    a gate of the attention's output next to each head's queries; attention_gate_proj: path of a projection that makes
    one, with a single number for each head where gate_of_heads.
    latent: of keys and values that come from a latent, as in all layers; head_dim is then that of queries and keys.
    experts: of layers that have such in the place of an MLP.
    head_dims, kv_heads, mlp_widths: of each layer, where they differ. kv_sources[i]: the layer whose keys and values
    layer i uses (if not "()", where each has its own). keys_as_values[i]: it has no v_proj: what k_proj gives is its
    values too. value_norm: each head's values are normed, without weights. layer_scale: a layer's output is scaled by
    its layer_scalar, which is never trained. per_layer: embeddings that each layer has of its own.
    altup: several streams, LAuReL and sparse activations.
    mixing_layers, mlp_layers: which have attention, or what is in its place, and which an MLP (if "()", all).
    attention: the path of q_proj, k_proj and v_proj. attention_in_scale, attention_out_scale, gate_scale, down_scale:
    of attention's input and output, of what gate_proj gives, and of the MLP's output.
    file_names: the beginnings of tensors' names, and those that files have instead, of which the first is written.
    embedding: the embedding's path in transformers' model.
    text_of: the multimodal architecture of which this is the text part ("": none).
    extra_layers: files may have so many more, which predict several tokens at once and are left out.
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
    hidden_act: str = "silu"  # or another of _ACTIVATIONS
    windows: tuple[int, ...]
    use_rope: tuple[bool, ...]
    rope: RopeConfig
    quantization: QuantizationFile | None = None  # where bitsandbytes made the weights NF4
    # No part of `repr`, by which checkpoints know a model: see `identity`.
    attention_norm: str = field(default="input_layernorm", repr=False)
    attention_out_norm: str = field(default="", repr=False)
    mlp_norm: str = field(default="post_attention_layernorm", repr=False)
    mlp_out_norm: str = field(default="", repr=False)
    norm_offset: float = field(default=0.0, repr=False)
    embedding_scale: float = field(default=1.0, repr=False)
    score_scale: float = field(default=0.0, repr=False)
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
    longest: int = field(default=0, repr=False)
    interleaved: bool = field(default=False, repr=False)
    query_growth: float = field(default=0.0, repr=False)
    query_length: int = field(default=0, repr=False)
    sinks: bool = field(default=False, repr=False)
    clip_qkv: float = field(default=0.0, repr=False)
    q_norm: str = field(default="self_attn.q_norm", repr=False)
    k_norm: str = field(default="self_attn.k_norm", repr=False)
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
    latent: LatentAttention | None = field(default=None, repr=False)
    experts: Experts | None = field(default=None, repr=False)
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
    fp8_block: tuple[int, int] | None = field(default=None, repr=False, compare=False)  # of files, not of the model
    packing: Packing | None = field(default=None, repr=False, compare=False)  # too

    @property
    def in_peft(self) -> str:
        """Return what transformers, and so PEFT, puts before the names of the decoder's modules."""
        return MULTIMODAL[self.text_of].in_peft if self.text_of else FAMILIES[self.architecture].in_peft

    def head_dim_of(self, layer: int) -> int:
        return self.head_dims[layer] if self.head_dims else self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads[layer] if self.kv_heads else self.num_key_value_heads

    def q_size_of(self, layer: int) -> int:
        return self.num_attention_heads * self.head_dim_of(layer)

    def kv_size_of(self, layer: int) -> int:
        return self.kv_heads_of(layer) * self.head_dim_of(layer)

    def mlp_width_of(self, layer: int) -> int:
        """The width of a layer's MLP without experts."""
        return self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer uses: itself, in most models."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def keys_of(self, layer: int) -> str:
        """Return which of the projections k and v a layer has."""
        if self.kv_source(layer) != layer:
            return ""
        return "k" if self.keys_as_values and self.keys_as_values[layer] else "kv"

    def shares_keys(self, layer: int) -> bool:
        """Return whether a layer behind this one uses its keys and values."""
        return layer in self.kv_sources[layer + 1 :]

    @property
    def gguf(self) -> str:
        """llama.cpp's name of the architecture; "": it is not written into GGUF files."""
        family = FAMILIES[self.architecture]
        others = (name for part, name in family.gguf_others if getattr(self, part) is not None)
        return next(others, family.gguf)

    def linear_of(self, layer: int) -> Mixer | None:
        """Return what a layer has in the place of attention or alongside it, if it has such."""
        return self.linear if self.linear is not None and self.linear.layers[layer] else None

    def mixes(self, layer: int) -> bool:
        """Return whether a layer has attention, or what is in its place."""
        return self.mixing_layers[layer] if self.mixing_layers else True

    def attends(self, layer: int) -> bool:
        linear = self.linear_of(layer)
        return self.mixes(layer) and (linear is None or linear.alongside)

    @property
    def any_attends(self) -> bool:
        """Return whether a layer has attention."""
        return any(map(self.attends, range(self.num_hidden_layers)))

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return self.mlp_layers[layer] if self.mlp_layers else True

    def norms_of(self, layer: int) -> tuple[str, str, str, str]:
        """Return a layer's norms, "" for none: before attention, of its output, before the MLP, of its output."""
        linear = self.linear_of(layer)
        usual = (
            *((self.attention_norm, self.attention_out_norm) if self.mixes(layer) else ("", "")),
            *((self.mlp_norm, self.mlp_out_norm) if self.has_mlp(layer) else ("", "")),
        )
        return usual if linear is None or linear.norms is None else linear.norms

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def mlp_width(self) -> int:
        """Elements of the activations of the widest MLP, for a token."""
        routed = self.experts.chosen * self.experts.width if self.experts else 0
        dense = max(self.mlp_widths, default=self.intermediate_size)
        if self.experts is not None and self.experts.norms is not None:
            return routed + dense
        return max(routed, dense if self.experts is None or not all(self.experts.layers) else 0)

    @property
    def read_again_at(self) -> int:
        """Tokens of a text at which generation fills its cache anew; 0: never. So transformers has it of Phi-3 alone:
        keys that were made with the short factors do not go with the long ones."""
        beyond = self.rope.original_max_position_embeddings + 1
        return beyond if FAMILIES[self.architecture].reads_again and self.rope.type == "longrope" else 0

    def identity(self) -> str:
        """Text that two configurations share only where they are equal, and that checkpoints of before hold."""
        changed = _later(self)
        return repr(self) + (repr(changed) if changed else "")


def _later(part: Any) -> dict[str, Any]:
    """Return the fields that a configuration's `repr` leaves out."""
    changed = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if not f.repr and f.compare and value != f.default:
            changed[f.name] = value
        if is_dataclass(value) and (inside := _later(value)):
            changed[f"{f.name} too"] = inside
    return changed


def load_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read `folder`/config.json. WgradError: no such file, not JSON, a value out of range, an unsupported architecture
    or variant."""
    path = Path(folder) / "config.json"
    if not exists(path, "--model"):
        raise WgradError(f"--model: {folder} has no config.json: give the folder of a model in Hugging Face layout")
    return parse_model_config(read_json(path, dict[str, Any], "--model", from_python=True), f"--model: {path}")


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Mapping of config.json -> ModelConfig; `where` opens each error."""
    name = _architecture(convert(raw, NameFile, where), where)
    if name in MULTIMODAL:
        text = parse_model_config(text_config(raw, name, where), f"{where}: text_config")
        if text.experts is not None and (files := MULTIMODAL[name].experts_files):
            text = replace(text, experts=replace(text.experts, files=files))
        return replace(text, text_of=name)
    family = FAMILIES[name]
    file = convert(raw, family.keys, where)
    _refuse_others(raw, file, where)
    layers, (heads, kv_heads, head_dim) = file.num_hidden_layers, file.attention_sizes
    variant: dict[str, Any] = {"windows": (0,) * layers, "use_rope": (True,) * layers}
    variant |= {"hidden_act": file.hidden_act, "rms_norm_eps": file.rms_norm_eps}
    variant |= family.variant(file)
    if variant.get("experts") is not None:
        variant["experts"] = replace(variant["experts"], balance=file.balance)
    variant["hidden_act"] = _activation(variant["hidden_act"], variant.get("gated", True), where)
    latent: LatentAttention | None = variant.get("latent")
    head_dim = latent.width if latent else head_dim
    head_dims, all_kv_heads = variant.get("head_dims") or (head_dim,), variant.get("kv_heads") or (kv_heads,)
    for width, groups in dict.fromkeys(((head_dim, kv_heads), *zip(head_dims, all_kv_heads))):
        _check_heads(heads, groups, width, where)
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
        **variant,
    )


def _architecture(file: NameFile, where: str) -> str:
    """By `model_type`, as transformers' AutoModelForCausalLM; by `architectures` where a file has no model_type."""
    names = file.architectures or []
    by_type = {kind: name for name, family in FAMILIES.items() for kind in (family.model_type, *family.other_types)}
    by_type |= {whole.model_type: name for name, whole in MULTIMODAL.items()}
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
    """The head_dim of layers without a window, and of those with one; of a kind that no layer has the other's."""
    dims = {window > 0: width for window, width in zip(windows, head_dims)}
    return dims.get(False, head_dims[0]), dims.get(True, head_dims[0])


def _check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    if heads % kv_heads:
        raise WgradError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {kv_heads} (a "
            f"missing key has the architecture's default): {FETCH}"
        )
    if head_dim % 2 or not head_dim:
        raise WgradError(
            f"{where}: head_dim (hidden_size / num_attention_heads where it is not given) must be even, for rotary "
            f"embeddings, and at least 2; got {head_dim}: {FETCH}"
        )


def _refuse_others(raw: Mapping[str, Any], file: ConfigFile, where: str) -> None:
    """WgradError where a key asks for what is not built here."""
    for key, supported in {**UNSUPPORTED, **file.unsupported}.items():
        if key in raw and raw[key] not in supported and (key in file.unsupported or not hasattr(file, key)):
            raise WgradError(
                f"{where}: {key} {show(raw[key])} is not supported: only {' or '.join(map(show, supported))} is"
            )


def _activation(name: str, gated: bool, where: str) -> str:
    known = [key for key in _ACTIVATIONS if key != "swish" and not (gated and key in _UNGATED)]
    if name not in (*known, "swish"):
        raise WgradError(f"{where}: hidden_act {show(name)} is not supported: {', '.join(known)} are")
    return _ACTIVATIONS[name]
