"""The tensors of a model: their names, shapes and kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from wgrad.train.model.altup import SCALE
from wgrad.train.model.experts import Experts
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.per_layer import NORM, OUT_NORM, PROJECTION, TABLE

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
PROJECT_IN, PROJECT_OUT = "model.project_in", "model.project_out"  # between embeddings, the stream and the head
LAYER_SCALE = "layer_scalar"
XIELU = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")  # parameters of the activation
CONSTANTS = {"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6}  # constants of the activation, equal in all models

WholeModules = dict[str, dict[str, tuple[int, ...]]]  # shapes of a module's weights by name, by the module's path


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of a model.

    Attributes:
        kind: embedding, head, projection, experts (all of a layer, [experts, out, in]), router, norm or bias.
        offset: Number that is added to the file's values.
        float32: Whether it is float32 in files, whatever dtype other tensors have.
        trained: Whether --full trains it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: float = 0.0
    float32: bool = False
    trained: bool = True

    @property
    def decays(self) -> bool:
        """True for weights to which weight decay applies."""
        return len(self.shape) > 1 and self.kind != "bias" and not self.name.endswith("norm.weight")

    @property
    def is_linear(self) -> bool:
        """True for weights that may be quantized."""
        return self.kind in ("projection", "experts")


def projection_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of a layer's projections, except its experts', by path within the layer."""
    hidden, ffn = config.hidden_size, config.mlp_width_of(layer)
    q_size, kv_size = config.q_size_of(layer), config.kv_size_of(layer)
    if config.fused:  # q, k and v as well as gate and up
        return {
            "self_attn.qkv_proj": (q_size + 2 * kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_up_proj": (2 * ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
    if config.gate_up_proj:
        first = {config.gate_up_proj: (2 * ffn, hidden)}
    else:
        first = {**({config.gate_proj: (ffn, hidden)} if config.gated else {}), config.up_proj: (ffn, hidden)}
    gates = config.heads_of(layer) if config.gate_of_heads else q_size
    attention = {
        f"{config.attention}.q_proj": (q_size * (2 if config.attention_gate else 1), hidden),
        **{f"{config.attention}.{part}_proj": (kv_size, hidden) for part in config.keys_of(layer)},
        **({config.attention_gate_proj: (gates, hidden)} if config.attention_gate_proj else {}),
        config.o_proj: (hidden, q_size),
    }
    if config.qkv_proj:
        attention = {config.qkv_proj: (q_size + 2 * kv_size, hidden), config.o_proj: (hidden, q_size)}
    if config.latent is not None:
        attention = config.latent.projections(hidden, config.num_attention_heads, config.o_proj)
    if (linear := config.linear_of(layer)) is not None:
        attention = linear.projections(hidden) | (attention if linear.alongside else {})
    attention = attention if config.mixes(layer) else {}
    beside = {**(config.per_layer.projections(hidden) if config.per_layer else {})}
    beside |= config.altup.projections(hidden) if config.altup else {}
    if config.experts is not None and config.has_experts(layer) and config.experts.norms is None:
        return {**attention, **config.experts.projections(hidden)}
    mlp = {**first, config.down_proj: (hidden, ffn)} if config.has_mlp(layer) else {}
    return {**attention, **mlp, **beside}


def outer_projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of the projections outside of layers by path."""
    found = config.altup.outer(config.hidden_size) if config.altup else {}
    if config.per_layer is not None:
        found[PROJECTION] = (config.num_hidden_layers * config.per_layer.width, config.hidden_size)
    if config.embedding_width:
        found[PROJECT_IN] = (config.hidden_size, config.embedding_width)
        found[PROJECT_OUT] = (config.embedding_width, config.hidden_size)
    return found


def used_weights(config: ModelConfig) -> int:
    """Return the number of elements of all projections that a token is multiplied with."""
    total = sum(rows * columns for rows, columns in outer_projections(config).values())
    for layer in range(config.num_hidden_layers):
        total += sum(rows * columns for rows, columns in projection_shapes(config, layer).values())
        if config.experts is not None and config.has_experts(layer):
            matrices = 3 if config.experts.gated else 2
            outer = config.experts.latent_width or config.hidden_size
            total += matrices * config.experts.chosen * config.experts.width * outer
    return total


def numbers_in_layers(config: ModelConfig) -> int:
    """Return the number of elements of all layers' projections, including all experts."""
    outer = {f"{module}.weight" for module in outer_projections(config)}
    specs = (spec for spec in weight_specs(config) if spec.is_linear and spec.name not in outer)
    return sum(math.prod(spec.shape) for spec in specs)


def layer_flops(config: ModelConfig, tokens: int) -> float:
    """Return the average FLOP of a layer's matmuls with weights in the forward."""
    return 2.0 * tokens * used_weights(config) / config.num_hidden_layers


def activation_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Estimate the bytes that a forward keeps for its backward without recomputation."""
    linear, layers = config.linear, range(config.num_hidden_layers)
    heads = {i: 3 * config.heads_of(i) + 2 * config.kv_heads_of(i) * (config.kv_source(i) == i) for i in layers}
    products = 2 * config.hidden_size + (3 if config.gated else 2) * config.mlp_width
    products += 4 * config.per_layer.width if config.per_layer else 0
    products += 8 * config.altup.streams * config.hidden_size if config.altup else 0
    products += 2 * config.experts.chosen * config.hidden_size if config.experts else 0
    mixed = sum(heads[layer] * config.key_width_of(layer) for layer in layers if config.attends(layer))
    mixed += linear.kept * sum(linear.layers) if linear else 0
    return tokens * ((mixed + len(layers) * products) * itemsize + len(layers) * 2 * config.hidden_size * 4)


def mlp_row_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of a token's gate, up and product in an MLP, and of their gradients."""
    return 6 * config.mlp_width * itemsize


def attention_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of attention's outputs in a step: o and lse of all layers that have attention."""
    layers = filter(config.attends, range(config.num_hidden_layers))
    return tokens * sum(config.heads_of(i) * (config.key_width_of(i) * itemsize + 4) for i in layers)


def whole_modules(config: ModelConfig) -> WholeModules:
    """Return the modules that an adapter may contain whole, by PEFT's names.

    Each has the shapes of its weights by our names. As in PEFT, a head that is tied to the embedding is a separate
    module here.
    """
    table = (config.vocab_size, config.table_width)
    bias = {HEAD_BIAS: (config.vocab_size,)} if config.head_bias else {}
    return {config.embedding: {EMBEDDING: table}, HEAD.removesuffix(".weight"): {HEAD: table, **bias}}


def whole_in_peft(modules: WholeModules) -> dict[str, str]:
    """Return PEFT's names of these modules' weights by ours."""
    return {name: f"{module}.{name.rpartition('.')[2]}" for module, names in modules.items() for name in names}


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Return all tensors of the model, in the order in which layers use them."""
    specs = [WeightSpec(EMBEDDING, (config.vocab_size, config.table_width), "embedding")]
    if (own := config.per_layer) is not None:
        specs.append(WeightSpec(TABLE, (own.vocabulary, config.num_hidden_layers * own.width), "embedding"))
        specs.append(WeightSpec(f"{NORM}.weight", (own.width,), "norm"))
    if config.position_table:
        rows = config.position_offset + config.positions
        specs.append(WeightSpec(f"{config.position_table}.weight", (rows, config.hidden_size), "norm"))
    for module, shape in outer_projections(config).items():
        specs.append(WeightSpec(f"{module}.weight", shape, "projection"))
    for layer in range(config.num_hidden_layers):
        specs.extend(_layer_specs(config, layer))
    specs.extend(_norm(config, config.final_norm))
    if not config.tie_word_embeddings:
        specs.append(WeightSpec(HEAD, (config.vocab_size, config.table_width), "head"))
    if config.head_bias:
        specs.append(WeightSpec(HEAD_BIAS, (config.vocab_size,), "bias"))
    return specs


def constants(config: ModelConfig) -> dict[str, float]:
    """Return the constants that transformers expects among the tensors of a model's files."""
    layers = range(config.num_hidden_layers) if config.hidden_act == "xielu" else ()
    return {f"model.layers.{i}.{name}": value for i in layers for name, value in CONSTANTS.items()}


def _norm(config: ModelConfig, module: str) -> Iterator[WeightSpec]:
    """Yield the weight and bias, if any, of a norm of the residual stream. module: its path; "": there is none."""
    if not config.norm_weight or not module:
        return
    yield WeightSpec(f"{module}.weight", (config.hidden_size,), "norm", config.norm_offset)
    if config.layer_norm and config.norm_bias:
        yield WeightSpec(f"{module}.bias", (config.hidden_size,), "bias")


def _layer_specs(config: ModelConfig, layer: int) -> Iterator[WeightSpec]:
    """Yield the tensors of a layer."""
    prefix, linear = f"model.layers.{layer}.", config.linear_of(layer)
    norms = [*config.norms_of(layer), *([OUT_NORM] if config.per_layer else [])]
    for norm in dict.fromkeys(filter(None, norms)):  # once, where attention and MLP read the same
        yield from _norm(config, prefix + norm)
    for name, sizes in linear.others.items() if linear is not None else ():
        yield WeightSpec(prefix + name, sizes, "norm")
    yield from _qk_norms(config, layer, prefix)
    if config.sinks:
        yield WeightSpec(f"{prefix}self_attn.sinks", (config.heads_of(layer),), "bias")
    if config.altup is not None:
        for norm in config.altup.norms:
            yield from _norm(config, prefix + norm)
        yield WeightSpec(prefix + SCALE, (config.hidden_size,), "bias")
    if config.layer_scale:
        yield WeightSpec(f"{prefix}{LAYER_SCALE}", (1,), "norm", trained=False)
    if config.hidden_act == "xielu":
        for name in XIELU:
            yield WeightSpec(f"{prefix}{name}", (1,), "bias")
    biased = _biased(config, layer)
    for module, shape in projection_shapes(config, layer).items():
        yield WeightSpec(f"{prefix}{module}.weight", shape, "projection")
        if biased.get(module, config.mlp_bias):
            yield WeightSpec(f"{prefix}{module}.bias", shape[:1], "bias")
    if config.experts is not None and config.has_experts(layer):
        yield from _experts(config, config.experts, prefix)


def _biased(config: ModelConfig, layer: int) -> dict[str, bool]:
    """Return whether a layer's projections have a bias, by path; those that are not listed have one as its MLP."""
    found = {f"{config.attention}.{part}_proj": config.qkv_bias for part in "qkv"} | {config.o_proj: config.o_bias}
    found |= {config.attention_gate_proj: False, config.qkv_proj: config.qkv_bias}
    linear = config.linear_of(layer)
    return found | (config.latent.biases if config.latent else {}) | (linear.biased if linear is not None else {})


def _qk_norms(config: ModelConfig, layer: int, prefix: str) -> Iterator[WeightSpec]:
    """Yield the norms within a layer's attention, of its queries and keys or of its latents."""
    if config.qk_norm and config.qk_norm_weight and config.norm_weight and config.linear_of(layer) is None:
        widths = {config.q_norm: config.q_size_of(layer), config.k_norm: config.kv_size_of(layer)}
        for norm, width in list(widths.items())[: 2 if config.keys_of(layer) else 1]:
            each = config.head_dim_of(layer)
            size = (width // each, each) if config.qk_norm_heads else (width if config.qk_norm_whole else each,)
            yield WeightSpec(f"{prefix}{norm}.weight", size, "norm", config.norm_offset)
            if config.qk_layer_norm and not config.qk_norm_heads:
                yield WeightSpec(f"{prefix}{norm}.bias", size, "bias")
    for norm, width in config.latent.norms.items() if config.latent else ():
        yield WeightSpec(f"{prefix}{norm}.weight", (width,), "norm")


def _experts(config: ModelConfig, experts: Experts, prefix: str) -> Iterator[WeightSpec]:
    """Yield the tensors of a layer's router and experts. Those of a shared expert are among its projections."""
    yield WeightSpec(f"{prefix}{experts.router}.weight", (experts.count, config.hidden_size), "router")
    for norm in experts.norms or ():
        yield from _norm(config, prefix + norm)
    for name, size in ((experts.router_scale, config.hidden_size), (experts.share_scales, experts.count)):
        if name:
            yield WeightSpec(prefix + name, (size,), "norm")
    if experts.correction:
        sizes = (1, experts.count) if experts.correction_rows else (experts.count,)
        yield WeightSpec(prefix + experts.correction, sizes, "bias", float32=True)
    if experts.shared_width and experts.shared_gate:
        yield WeightSpec(f"{prefix}{experts.shared_gate}.weight", (1, config.hidden_size), "router")
    if experts.biased:
        yield WeightSpec(f"{prefix}{experts.router}.bias", (experts.count,), "bias")
    for module, of_all in experts.shapes(config.hidden_size).items():
        yield WeightSpec(f"{prefix}{module}", of_all, "experts")
        if experts.biased:
            yield WeightSpec(f"{prefix}{module}_bias", of_all[:2], "bias")
