"""The keys of config.json that every family has, with types, ranges and defaults. families.py has each family's own.

A missing key has the default of the architecture's configuration class in transformers 5; null is refused where
transformers refuses it. The ranges exceed all existing models by far: they refuse only nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, show

Width = Annotated[int, Meta(ge=1, le=1 << 22)]
MOST_IDS = 1 << 24
Vocabulary = Annotated[int, Meta(ge=1, le=MOST_IDS)]
Count = Annotated[int, Meta(ge=1, le=1 << 12)]
Positions = Annotated[int, Meta(ge=1, le=1 << 31)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e6)]
Epsilon = Annotated[float, Meta(ge=0, lt=1)]
Theta = Annotated[float, Meta(gt=1, le=1e15)]
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")  # "attention": older name of "full_attention"


class NameFile(Struct):
    """Keys that name the architecture."""

    architectures: list[str] | None = None
    model_type: str | None = None


class RopeFile(Struct):
    """`rope_parameters` (transformers 5) or `rope_scaling` (4).

    full_attention, sliding_attention: parameters by the kind of layer, in families that have both.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: AtLeast0 | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: AtLeast0 | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: AtLeast0 | None = None
    mscale_all_dim: AtLeast0 | None = None
    truncate: bool = True
    alpha: Factor | None = None
    short_mscale: Factor | None = None
    long_mscale: Factor | None = None
    llama_4_scaling_beta: AtLeast0 | None = None
    short_factor: list[Factor] | None = None
    long_factor: list[Factor] | None = None
    full_attention: RopeFile | None = None
    sliding_attention: RopeFile | None = None


class QuantizationFile(Struct):
    """`quantization_config` of bitsandbytes in transformers. Checkpoints contain its `repr`."""

    quant_method: str | None = None
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False


class WeightsFile(Struct):
    """Codes of weights that compressed-tensors wrote."""

    num_bits: int = 8
    type: str = "int"
    block_structure: tuple[Count, Count] | None = None


class GroupFile(Struct):
    """Modules that compressed-tensors quantizes in the same way."""

    weights: WeightsFile | None = None
    format: str | None = None


class AnyQuantizationFile(QuantizationFile):
    """`quantization_config` of any integration. 8-bit floats have a scale for each block of weight_block_size rows and
    columns (null: one scale for the whole weight)."""

    load_in_8bit: bool = False
    fmt: str = "e4m3"
    weight_block_size: tuple[Count, Count] | None = (128, 128)
    quant_algo: str | None = None  # ModelOpt
    bits: int | float | None = None  # GPTQ and AWQ: a whole number
    w_bit: int | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    format: str | None = None  # compressed-tensors
    config_groups: dict[str, GroupFile] | None = None
    transform_config: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None


# Keys of features that are not supported, with the values that do not request them. A family that reads such a key has
# it as a field, or lists its own values in `unsupported`.
_NONE: tuple[Any, ...] = (None, False, 0)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), (None, 0, 1)),
    **dict.fromkeys(("alibi", "use_alibi", "use_cla", "use_mla", "kv_lora_rank", "q_lora_rank"), _NONE),
    **dict.fromkeys(("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", "use_qk_norm"), _NONE),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input", "add_cross_attention"), _NONE),
    "use_bidirectional_attention": (None, False),
    "position_embedding_type": (None, "rope", "rotary", "absolute"),  # transformers writes "absolute" by default
}


class ConfigFile(Struct, kw_only=True):
    """Keys common to all architectures, with the defaults of transformers' LlamaConfig.

    Attributes:
        default_theta, default_rope: Used if the file has no rope_theta or no rope_parameters.
        partial_rotary: Whether the family may rotate only a part of each head.
        reversed_rope: Whether heads are rotated in the other direction.
        some_have_experts: Whether models of the family may have experts or not.
        unsupported: Like UNSUPPORTED, for this family.
        dropouts: Keys of the dropout that transformers applies in training, with their defaults.
    """

    default_theta: ClassVar[float] = 10_000.0
    default_rope: ClassVar[RopeFile] = RopeFile()
    partial_rotary: ClassVar[bool] = False
    reversed_rope: ClassVar[bool] = False
    some_have_experts: ClassVar[bool] = False
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0}
    vocab_size: Vocabulary = 32_000
    hidden_size: Width = 4096
    intermediate_size: Width = 11_008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Width | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Positions = 2048
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: Theta | None = None
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    partial_rotary_factor: AtLeast0 | None = None
    original_max_position_embeddings: Positions | None = None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=64)] | None = 0
    quantization_config: AnyQuantizationFile | None = None

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Return the number of heads, the number of key heads, and the width of a head."""
        heads = self.num_attention_heads
        return heads, self.num_key_value_heads or heads, self.head_dim or self.hidden_size // heads

    def asked_dropouts(self, raw: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
        """Return the dropouts above 0 of a config.json, by key."""
        found = {key: raw.get(key, default) for key, default in self.dropouts.items()}
        return tuple((key, p) for key, p in found.items() if isinstance(p, (int, float)) and p > 0)

    @property
    def balance(self) -> float:
        """Return the weight of the load-balancing loss of experts."""
        return 0.0

    @property
    def layer_thetas(self) -> tuple[float | None, float | None]:
        """Return theta of layers without and with a window, if the file names them by layer."""
        return None, None

    @property
    def local_theta(self) -> float | None:
        """Return theta of sliding layers with their own rotary embeddings, if `rope_parameters` does not name it."""
        return None


def check_layers(key: str, listed: Sequence[object] | None, layers: int) -> None:
    """Raise ValueError if a list has another number of entries than there are layers."""
    if listed is not None and len(listed) != layers:
        raise ValueError(f"{key} must name each of the {layers} layers (num_hidden_layers); got {len(listed)}")


def check_layer_types(listed: Sequence[str] | None, layers: int, window: int | None) -> None:
    """Raise ValueError if `layer_types` has a wrong length, an unsupported kind, or sliding layers without a window."""
    check_layers("layer_types", listed, layers)
    for kind in listed or ():
        if kind not in _LAYER_TYPES:
            raise ValueError(f"layer_types must be full_attention or sliding_attention; got {kind!r}")
    if window is None and listed and "sliding_attention" in listed:
        raise ValueError("layer_types has sliding_attention, so sliding_window must be in use; it is null or off")


def check_mlp_layer_types(listed: Sequence[str] | None, layers: int) -> None:
    """Raise ValueError if `mlp_layer_types` has a wrong length or an unsupported kind."""
    check_layers("mlp_layer_types", listed, layers)
    for kind in listed or ():
        if kind not in ("dense", "sparse"):
            raise ValueError(f"mlp_layer_types must be dense or sparse; got {kind!r}")


def layer_windows(listed: Sequence[str] | None, window: int | None, unlisted: Iterable[bool]) -> tuple[int, ...]:
    """Return each layer's window, 0 for none. listed: `layer_types`. unlisted: layers that slide if it is missing."""
    slides = unlisted if listed is None else (kind == "sliding_attention" for kind in listed)
    return tuple(window or 0 if layer else 0 for layer in slides)


class LayerTypesFile(ConfigFile, kw_only=True):
    """Keys of families whose classes in transformers read `layer_types`, which says which layers have the window."""

    sliding_window: Positions | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        check_layer_types(self.layer_types, self.num_hidden_layers, self.window)

    @property
    def window(self) -> int | None:
        """Return the tokens of a window; None if no layer has one."""
        return self.sliding_window

    def windows(self, unlisted: Iterable[bool]) -> tuple[int, ...]:
        """Return each layer's window, 0 for none. unlisted: layers that slide if `layer_types` is missing."""
        return layer_windows(self.layer_types, self.window, unlisted)


def check_causal(bidirectional: bool | None) -> None:
    """Raise ValueError if the key `use_bidirectional_attention` is true."""
    if bidirectional:
        raise ValueError("use_bidirectional_attention must be false: attention here is causal; got true")


def check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    """Raise WgradError if the number or size of heads is not supported. `where` begins the message."""
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


def refuse_unsupported(
    raw: Mapping[str, Any], file: ConfigFile, where: str, built: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise WgradError if a key asks for a feature that is not supported.

    Args:
        raw: The mapping of a config.json.
        file: Its keys as the family reads them.
        where: Begins the error.
        built: Values of UNSUPPORTED's keys that ask for what this model has.
    """
    usual = {key: (*values, *built.get(key, ())) for key, values in UNSUPPORTED.items()}
    for key, supported in {**usual, **file.unsupported}.items():
        if key in raw and raw[key] not in supported and (key in file.unsupported or not hasattr(file, key)):
            raise WgradError(
                f"{where}: {key} {show(raw[key])} is not supported: only {' or '.join(map(show, supported))} is"
            )
