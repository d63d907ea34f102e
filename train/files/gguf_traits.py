"""The table of llama.cpp's architectures: their properties, most of which have no key in GGUF files.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp, src/models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class FileKey(NamedTuple):
    """A key of config.json, and the key of the file (without the architecture) that states it."""

    key: str
    stated: str
    kind: Any  # int, float or bool
    needed: bool = False  # refuse files without it
    default: Any = None
    zero_is_none: bool = False


@dataclass(frozen=True)
class GgufTraits:
    """Properties of an architecture in llama.cpp. The defaults are those of most."""

    # Tensors.
    paired: bool = False  # rotary embeddings rotate adjacent rows, so the rows of q and k are reordered
    stacks_qkv: bool = False  # files may have q, k and v in one tensor
    splits_kv_b: bool = False  # newer files split kv_b_proj by head into keys and values
    multiplied: bool = False  # multipliers have no keys: they are multiplied into the weights
    biased: bool = False  # attention has biases
    unbiased: tuple[str, ...] = ()  # parts of names of modules whose biases are not loaded
    # 80 layers are a 70B model: if there are as many key heads as heads, and if there are fewer.
    sized_70b: tuple[bool, bool] = (False, False)

    # Keys of config.json.
    keys: tuple[FileKey, ...] = ()  # further ones
    constants: dict[str, Any] = field(default_factory=dict)  # further ones, the same in every model
    # Keys that are true if the first layer has a tensor, or if it lacks the one after "!".
    told: dict[str, str] = field(default_factory=dict)
    layer_norm: str = ""  # name of the epsilon, if norms are LayerNorm
    or_rms_norm: bool = False  # norms are RMSNorm in files with its epsilon
    rope_names: tuple[str, ...] = ()  # names of theta and of the share of a head that is rotated
    multi_query: bool = False  # a key says whether there is only one key head
    counts_norms: bool = False  # keys count key heads, and the norms of attention and MLP

    # Attention and windows.
    attends: bool = True  # has attention
    untied: bool = False  # has a head of its own
    sized_layers: bool = False  # layers differ in their number of heads
    usual_width: bool = False  # heads have hidden size / heads elements
    shares: bool = False  # layers share keys and values, and have several shapes
    altup: bool = False  # has AltUp and LAuReL
    chunked: bool = False  # attends in chunks; every N-th layer has experts
    one_full_of: int = 0  # one of so many layers has no window
    windowed: int | None = None  # layers of the only model with windows; None: all may have them
    lists_windows: bool = False  # files list the layers with windows, which have theta and nothing else of the scaling
    full_first: bool = False  # or files state N: the first of every N layers has no window
    states_local_rope: bool = False  # files state theta and rotated elements of layers with windows
    one_rope: bool = False  # layers with windows have the scaling too
    states_no_window: bool = False  # files state 0 for no window
    needs_window: bool = False  # llama.cpp ends if no layer has one
    largest: int | None = None  # layers of the model that scales scores by hidden size / heads, which is in config.json
    normed_from: int | None = None  # layers from which models have norms of heads

    # Rotary embeddings.
    unrotated: bool = False  # has none; `rope.dimension_count` is meaningless
    one_unrotated_of: int = 0  # one of so many layers has none
    rotates_in_windows: bool = False  # if layers have windows, the others have none
    rotates_in_mlps: bool = False  # or layers without experts have them too
    lists_rotation: bool = False  # files may list the layers that have them
    states_rotation: bool = False  # `rope.scaling.finetuned` states whether layers have them; default true
    factors: bool = False  # may have a factor for each frequency, into which scaling as Llama 3's is written
    longrope: bool = False  # may have longrope's factors
    proportional: bool = False  # may rotate a share of the pairs; files have factors
    states_yarn: bool = False  # has keys for all numbers of yarn, and for the growth of late queries
    unrounded_yarn: bool = False  # trained with an unrounded yarn range; llama.cpp rounds it for all architectures
    states_growth: bool = False  # states where queries begin to grow; mscale_all_dim is 1

    # Scales and activations.
    activation: str = "silu"
    caps: bool = False  # caps scores and logits
    scaled: bool = False  # states factors of embeddings, scores, residuals and logits
    states_logit_scale: bool = False
    states_parallel: bool = False  # states whether attention and MLP are parallel
    scaled_embeddings: bool = False  # by the square root of their size
    scales: tuple[float, float, float] | None = None  # scale_emb, scale_depth and dim_model_base of all models

    # Experts.
    # Which keys of config.json state them, by `gguf_experts.EXPERT_KEYS`; "": the usual ones.
    expert_keys: str = ""
    renamed: dict[str, str] = field(default_factory=dict)  # names in config.json of those keys
    counts: tuple[str, ...] = ("num_local_experts", "num_experts")  # names of the usual number
    normalizes: bool | None = None  # the chosen experts' weights add up to 1; None: a key states it, or no experts
    unscaled: bool = False  # reads no factor of the experts' weights
    swiglu: tuple[float, float] = (0.0, 0.0)  # alpha and limit
    states_expert_width: bool = True
    equal_heads: bool = False  # with experts, as many heads of keys as of queries
    lists_mlps: bool = False  # config.json lists the kind of each layer's MLP
    averages: bool = False  # the output is the mean of experts' and shared experts'
    fused_shared: bool = False  # gate and up of shared experts are one tensor
    without_mlps: bool = False  # all layers have experts

    tensors_tell: bool = False  # tensors say which layers have experts

    # Layers with Mamba.
    # Names in config.json of state, groups, heads, numbers of a head, width and bias of the convolution; of Mamba-1,
    # which has no groups and heads, of state, rank of the time steps, width and bias of the convolution.
    mamba: tuple[str, ...] = ()
    first_mamba: bool = False  # these are Mamba-1
    doubled: bool = False  # they have twice the numbers of the stream
    one_mixer: bool = False  # a layer is Mamba-2, attention or an MLP


_PROJ = ("_proj.",)
_WINDOW = FileKey("sliding_window", "attention.sliding_window", int)
_STATED_WINDOW, _WINDOW_OR_0 = _WINDOW._replace(needed=True), _WINDOW._replace(zero_is_none=True)
_CAPS = tuple(FileKey(key, key, float) for key in ("attn_logit_softcapping", "final_logit_softcapping"))
_LOGIT_SCALE = FileKey("logit_scale", "logit_scale", float, needed=True)
_GEMMA: dict[str, Any] = {"activation": "gelu_tanh", "unbiased": _PROJ}
_SCALES = (
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
)
_MAMBA = ("mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_conv", "mamba_conv_bias")
# fmt: off
_GRANITE: dict[str, Any] = {
    "paired": True, "factors": True, "scaled": True,
    "keys": tuple(FileKey(key, stated, float, default=1.0) for stated, key in _SCALES),
}
_GPT2: dict[str, Any] = {
    "layer_norm": "layer_norm_epsilon", "keys": (FileKey("n_inner", "feed_forward_length", int, needed=True),),
    "multi_query": True, "unrotated": True, "activation": "gelu_tanh",
}
_NEMOTRON_H: dict[str, Any] = {
    "paired": True, "unrotated": True, "activation": "relu2", "one_mixer": True,
    "mamba": ("ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim", "conv_kernel", "use_conv_bias"),
}
_BIAS_OF_Q = {"attention_bias": "self_attn.q_proj.bias"}
_BIAS_OF_O = {"use_bias": "self_attn.o_proj.bias"}
_COUNTED = {"n_routed_experts": "num_experts"}
_SHARED = {"n_shared_experts": "num_shared_experts"}
_DENSE = {"first_k_dense_replace": "num_dense_layers"}

# By general.architecture. One that is not listed has the defaults.
TRAITS = {
    "llama": GgufTraits(paired=True, factors=True, sized_70b=(False, True), normalizes=True, states_expert_width=False),
    "llama4": GgufTraits(unbiased=_PROJ, chunked=True, one_unrotated_of=4, factors=True, expert_keys="every_nth"),
    "mistral3": GgufTraits(paired=True, factors=True, states_yarn=True),
    "mistral4": GgufTraits(splits_kv_b=True, unbiased=_PROJ, states_growth=True, expert_keys="softmax"),
    "deepseek2": GgufTraits(splits_kv_b=True, unbiased=_PROJ, expert_keys="gated"),
    "minicpm3": GgufTraits(unbiased=_PROJ, longrope=True, scales=(12.0, 1.4, 256)),
    "qwen2": GgufTraits(usual_width=True, sized_70b=(True, True)),
    "qwen2moe": GgufTraits(usual_width=True, normalizes=False),
    "qwen3": GgufTraits(unbiased=_PROJ),
    "qwen3moe": GgufTraits(unbiased=_PROJ, normalizes=True),
    "qwen3next": GgufTraits(unbiased=_PROJ, normalizes=True),
    "qwen35": GgufTraits(unbiased=_PROJ),
    "qwen35moe": GgufTraits(unbiased=_PROJ, normalizes=True),
    "smollm3": GgufTraits(paired=True, unbiased=_PROJ, one_unrotated_of=4),
    "granite": GgufTraits(**_GRANITE),
    "granitemoe": GgufTraits(**_GRANITE, normalizes=True),
    "granitehybrid": GgufTraits(
        **_GRANITE, unrotated=True, states_rotation=True, counts=("num_local_experts",), normalizes=True, mamba=_MAMBA,
        doubled=True,
    ),
    "granite_swa": GgufTraits(
        **_GRANITE, lists_windows=True, needs_window=True, one_rope=True, lists_rotation=True, fused_shared=True,
        counts=("num_local_experts",), normalizes=True, states_expert_width=False,
    ),
    "jamba": GgufTraits(
        usual_width=True, unrotated=True, counts=("num_local_experts",), normalizes=False, states_expert_width=False,
        tensors_tell=True, mamba=("mamba_d_state", "mamba_dt_rank", "mamba_d_conv", "mamba_conv_bias"),
        first_mamba=True,
    ),
    "mamba": GgufTraits(
        attends=False, unrotated=True, mamba=("state_size", "time_step_rank", "conv_kernel", "use_conv_bias"),
        first_mamba=True, doubled=True,
    ),
    "falcon-h1": GgufTraits(multiplied=True, mamba=_MAMBA),
    "mamba2": GgufTraits(
        attends=False, unrotated=True,
        mamba=("state_size", "n_groups", "num_heads", "head_dim", "conv_kernel", "use_conv_bias"), doubled=True,
    ),
    "nemotron_h": GgufTraits(**_NEMOTRON_H),
    "nemotron_h_moe": GgufTraits(**_NEMOTRON_H, expert_keys="latent"),
    "gemma": GgufTraits(**_GEMMA),
    "gemma2": GgufTraits(
        **_GEMMA,  # if the keys of the caps are missing, llama.cpp uses Gemma 2's values
        keys=(_WINDOW_OR_0._replace(needed=True), _CAPS[0]._replace(default=50.0), _CAPS[1]._replace(default=30.0)),
        one_full_of=2, largest=46, caps=True,
    ),
    "gemma3": GgufTraits(**_GEMMA, keys=(_WINDOW_OR_0, *_CAPS), one_full_of=6, largest=62),
    "gemma3n": GgufTraits(**_GEMMA, shares=True, altup=True),
    "gemma4": GgufTraits(**_GEMMA, shares=True, proportional=True, expert_keys="block", normalizes=True),
    "olmo": GgufTraits(
        paired=True, unbiased=_PROJ, keys=(FileKey("clip_qkv", "attention.clamp_kqv", float),), usual_width=True,
        layer_norm="rms_norm_eps",  # config.json of OLMo has no epsilon: it is the same in every model
    ),
    "olmo2": GgufTraits(unbiased=_PROJ, usual_width=True, one_full_of=4, lists_windows=True),
    "olmoe": GgufTraits(
        unbiased=_PROJ, usual_width=True, normalizes=False, states_expert_width=False, equal_heads=True,
    ),
    "phi2": GgufTraits(stacks_qkv=True, layer_norm="layer_norm_eps", usual_width=True, activation="gelu_tanh"),
    "phi3": GgufTraits(
        keys=(_WINDOW_OR_0, FileKey("original_max_position_embeddings", "rope.scaling.original_context_length", int)),
        usual_width=True, states_no_window=True, longrope=True,
    ),
    "stablelm": GgufTraits(
        told={
            "use_qkv_bias": "self_attn.q_proj.bias", "use_parallel_residual": "!post_attention_layernorm.weight",
            "qk_layernorm": "self_attn.q_layernorm.weight",
        },
        layer_norm="layer_norm_eps", usual_width=True, states_parallel=True,
    ),
    "starcoder2": GgufTraits(told=_BIAS_OF_O, layer_norm="norm_epsilon", usual_width=True, activation="gelu_tanh"),
    "gptneox": GgufTraits(
        biased=True, keys=(FileKey("use_parallel_residual", "use_parallel_residual", bool, default=True),),
        told={"attention_bias": "attention.dense.bias"}, layer_norm="layer_norm_eps", states_parallel=True,
        rope_names=("rotary_emb_base", "rotary_pct"),
        activation="gelu",  # in llama.cpp the tanh form, whatever a model has
    ),
    "gpt2": GgufTraits(**_GPT2),
    "starcoder": GgufTraits(**_GPT2),
    "falcon": GgufTraits(
        unbiased=(".self_attention.", ".mlp."),
        keys=(FileKey("ffn_hidden_size", "feed_forward_length", int, needed=True),),
        constants={"new_decoder_architecture": True}, layer_norm="layer_norm_epsilon", counts_norms=True,
        activation="gelu",  # as for gptneox
    ),
    "ernie4_5": GgufTraits(unbiased=_PROJ, told=_BIAS_OF_O),
    "ernie4_5-moe": GgufTraits(unbiased=("_proj.", "lm_head."), expert_keys="by_width", normalizes=True),
    "arcee": GgufTraits(paired=True, unbiased=_PROJ, factors=True, activation="relu2"),
    "nemotron": GgufTraits(layer_norm="norm_eps", usual_width=True, activation="relu2"),
    "jais2": GgufTraits(layer_norm="layer_norm_eps", activation="relu2"),
    "cohere2": GgufTraits(
        unbiased=_PROJ, keys=(_LOGIT_SCALE, _STATED_WINDOW), layer_norm="layer_norm_eps", usual_width=True,
        one_full_of=4, rotates_in_windows=True, states_logit_scale=True,
    ),
    "cohere2moe": GgufTraits(
        unbiased=_PROJ, keys=(
            _LOGIT_SCALE, FileKey("intermediate_size", "expert_feed_forward_length", int, needed=True),
            FileKey("prefix_dense_intermediate_size", "feed_forward_length", int, zero_is_none=True),
        ), constants={"prefix_dense_sliding_window_pattern": 1}, layer_norm="layer_norm_eps", or_rms_norm=True,
        lists_windows=True, full_first=True, needs_window=True, one_rope=True, rotates_in_mlps=True,
        states_logit_scale=True, expert_keys="averaged", renamed=_COUNTED | _SHARED, lists_mlps=True, averages=True,
    ),
    "command-r": GgufTraits(
        unbiased=_PROJ, keys=(_LOGIT_SCALE,), layer_norm="layer_norm_eps", usual_width=True, normed_from=64,
        told={"use_qk_norm": "self_attn.q_norm.weight"}, states_logit_scale=True,
    ),
    "seed_oss": GgufTraits(unbiased=("o_proj.", "mlp."), told=_BIAS_OF_Q),
    "exaone4": GgufTraits(
        unbiased=_PROJ, usual_width=True, one_full_of=4, windowed=64, rotates_in_windows=True, factors=True,
    ),
    "exaone-moe": GgufTraits(
        keys=(_STATED_WINDOW,), one_full_of=4, rotates_in_windows=True, factors=True, expert_keys="scored",
        renamed=_COUNTED | _SHARED,
    ),
    "gpt-oss": GgufTraits(
        keys=(_STATED_WINDOW, FileKey("intermediate_size", "expert_feed_forward_length", int, needed=True)),
        one_full_of=2, unrounded_yarn=True, normalizes=True, swiglu=(1.702, 7.0),
    ),
    "hunyuan-dense": GgufTraits(unbiased=_PROJ),
    "hunyuan-moe": GgufTraits(unbiased=_PROJ, normalizes=True),
    "hy_v3": GgufTraits(
        unbiased=_PROJ, expert_keys="by_shared_width",
        renamed=_COUNTED | _SHARED | {"routed_scaling_factor": "router_scaling_factor", "norm_topk_prob": "route_norm"},
        normalizes=True, lists_mlps=True,
    ),
    "laguna": GgufTraits(
        unbiased=_PROJ, sized_layers=True, full_first=True, states_local_rope=True, expert_keys="by_shared_width",
        renamed=_COUNTED | {"routed_scaling_factor": "moe_routed_scaling_factor"}, normalizes=True, lists_mlps=True,
    ),
    "mellum": GgufTraits(
        unbiased=_PROJ, untied=True, lists_windows=True, normalizes=True, without_mlps=True,
    ),
    "apertus": GgufTraits(unbiased=_PROJ, factors=True, activation="xielu"),
    "chatglm": GgufTraits(told=_BIAS_OF_Q, usual_width=True),
    "glm4": GgufTraits(unbiased=("mlp.",), told=_BIAS_OF_Q),
    "glm4moe": GgufTraits(told=_BIAS_OF_Q | {"use_qk_norm": "self_attn.q_norm.weight"}, expert_keys="scored"),
    "dots1": GgufTraits(unbiased=_PROJ, expert_keys="scored", equal_heads=True),
    "lfm2": GgufTraits(unbiased=_PROJ, usual_width=True),
    "lfm2moe": GgufTraits(
        usual_width=True, expert_keys="scored", renamed=_COUNTED | _DENSE, normalizes=True, unscaled=True,
    ),
    "afmoe": GgufTraits(
        unbiased=_PROJ, keys=(_STATED_WINDOW,), constants={"mup_enabled": True}, one_full_of=4, rotates_in_windows=True,
        scaled_embeddings=True, expert_keys="scored",
        renamed=_COUNTED | _SHARED | _DENSE | {"routed_scaling_factor": "route_scale", "norm_topk_prob": "route_norm"},
    ),
    "minimax-m2": GgufTraits(
        expert_keys="scored", renamed=_COUNTED | {"moe_intermediate_size": "intermediate_size"}, normalizes=True,
        unscaled=True,
    ),
}
# fmt: on


def traits_of(architecture: str) -> GgufTraits:
    """Return the traits of an architecture by llama.cpp's name."""
    return TRAITS.get(architecture, GgufTraits())
