"""Tables of rotary embeddings with default, linear, dynamic, llama3, yarn, longrope and proportional scaling.

Inverse frequencies and angles are rounded to float32 at the same steps as in transformers, since the models were
trained with those values.
Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753); Llama 3.1's and dynamic
NTK scaling as described in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, show
from wgrad.train.model.config_file import ConfigFile, RopeFile

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Sizes and scaling of rotary embeddings. Fields that a type does not use keep their defaults.

    The angles of dynamic and longrope change for sequences longer than original_max_position_embeddings.

    Attributes:
        head_dim: Number of a head's elements that are rotated.
    """

    head_dim: int
    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0  # yarn, longrope: factor of cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = field(default=(), repr=False)  # longrope: a divisor of each pair's frequency
    long_factor: tuple[float, ...] = field(default=(), repr=False)
    backwards: bool = field(default=False, repr=False)  # pairs are rotated in the other direction: sin is negated
    turned: int = field(default=0, repr=False)  # proportional: number of first pairs that are rotated
    # Factor of the scores, from mscale_all_dim. Only latent attention uses it.
    score_factor: float = field(default=1.0, repr=False, compare=False)


def parse_ropes(
    file: ConfigFile, head_dim: int, local_head_dim: int, where: str
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the rotary embeddings of a config.json: `rope_scaling` (transformers 4), or else `rope_parameters` (5).

    Args:
        head_dim, local_head_dim: Head sizes of layers without and with a window.
        where: Beginning of errors.

    Returns:
        The rotary embeddings of layers, and those of layers with a window if the family has separate ones.

    Raises:
        WgradError: A key is missing or wrong, or the type is not supported.
    """
    if file.local_theta is not None:
        return _of_both_kinds(file, file.local_theta, (head_dim, local_head_dim), where)
    parameters = file.rope_parameters or file.default_rope
    given = parameters if file.rope_scaling in (None, RopeFile()) else file.rope_scaling
    if given.full_attention or given.sliding_attention:
        raise WgradError(f"{where}: rope_parameters of this architecture must be the same for all layers: {FETCH}")
    theta = given.rope_theta or file.rope_theta or file.default_theta
    original = file.original_max_position_embeddings or given.original_max_position_embeddings
    rope, (own, local) = _parse_rope(given, file, theta, original, head_dim, where), file.layer_thetas
    of_windows = None if local is None else dataclasses.replace(rope, theta=local)
    return (rope if own is None else dataclasses.replace(rope, theta=own)), of_windows


def _of_both_kinds(
    file: ConfigFile, local_theta: float, head_dims: tuple[int, int], where: str
) -> tuple[RopeConfig, RopeConfig]:
    """Read the two rotary embeddings of a family with sliding layers.

    As in transformers, `rope_scaling` overrides keys of `full_attention`. Its rope_type, which is "default" if
    rope_parameters is missing, takes precedence over the older key `type`. Of keys directly in `rope_parameters`, only
    `truncate` is read.
    """
    parameters = file.rope_parameters or file.default_rope
    full = parameters.full_attention or RopeFile(rope_type="default")
    if file.rope_scaling is not None:
        if file.rope_parameters is not None and parameters.full_attention is None:
            raise WgradError(
                f"{where}: rope_scaling stands alongside rope_parameters without full_attention, which contradict each "
                "other: remove the one that the model was not trained with"
            )
        scaling = {key: value for key, value in asdict(file.rope_scaling).items() if value is not None}
        full = replace(full, **scaling)
    found = []
    defaults = (file.rope_theta or file.default_theta, local_theta)
    for given, theta, head_dim in zip((full, parameters.sliding_attention or RopeFile()), defaults, head_dims):
        given = replace(given, truncate=parameters.truncate)
        original = given.original_max_position_embeddings
        found.append(_parse_rope(given, file, given.rope_theta or theta, original, head_dim, where))
    return found[0], found[1]


def _parse_rope(
    given: RopeFile, file: ConfigFile, theta: float, original: int | None, head_dim: int, where: str
) -> RopeConfig:
    """Read one rotary embedding.

    Args:
        given: Its keys.
        theta: Its base.
        original: original_max_position_embeddings, or None for max_position_embeddings.
        where: Beginning of errors.

    Raises:
        WgradError: A key is missing or wrong, or the type is not supported.
    """
    kind = given.rope_type or given.type or "default"
    kind = "longrope" if kind == "su" else kind  # its older name
    if kind not in ROPE_TYPES:
        raise WgradError(f"{where}: rope_type {show(kind)} is not supported: {', '.join(ROPE_TYPES)} are")
    if kind == "proportional":
        part = 1.0 if given.partial_rotary_factor is None else given.partial_rotary_factor
        if part > 1:
            raise WgradError(f"{where}: partial_rotary_factor must be at most 1; got {part}: {FETCH}")
        turned = int(part * head_dim // 2)
        factor = given.factor or 1.0
        return RopeConfig(head_dim, theta, kind, factor, backwards=file.reversed_rope, turned=turned)
    partial = file.partial_rotary_factor if given.partial_rotary_factor is None else given.partial_rotary_factor
    head_dim = _rotated(head_dim, 1.0 if partial is None else partial, file, where)
    plain = RopeConfig(head_dim, theta, backwards=file.reversed_rope)
    if kind == "dynamic" and given.alpha and head_dim > 2:  # HunYuan: another base, at any length
        return dataclasses.replace(plain, theta=theta * given.alpha ** (head_dim / (head_dim - 2)))
    if kind == "default":
        return plain
    scaling = _scaling(given, kind, file.max_position_embeddings, original, head_dim, where)
    return dataclasses.replace(plain, type=kind, **scaling)


def _scaling(
    given: RopeFile, kind: str, positions: int, original: int | None, head_dim: int, where: str
) -> dict[str, Any]:
    """Return the fields of RopeConfig that a type of scaling sets. positions: max_position_embeddings."""
    original = original or positions
    found: dict[str, Any] = {"original_max_position_embeddings": positions if kind == "dynamic" else original}
    if kind in ("yarn", "longrope") and given.factor is None:
        found["factor"] = positions / original
    else:
        found["factor"] = _needed(given, "factor", kind, where)
    found["score_factor"] = yarn_factor(found["factor"], given.mscale_all_dim or 0.0) ** 2
    if kind == "llama3":
        found |= {k: _needed(given, k, kind, where) for k in ("low_freq_factor", "high_freq_factor")}
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        if low > high:
            raise WgradError(
                f"{where}: high_freq_factor must be at least low_freq_factor; got {high} and {low}: {FETCH}"
            )
    if kind == "yarn":
        found |= {"beta_fast": given.beta_fast or 32.0, "beta_slow": given.beta_slow or 1.0}
        found |= {"truncate": given.truncate, "attention_factor": _yarn_factor(given, found["factor"])}
    if kind == "longrope":
        found |= {k: _factors(given, k, head_dim, where) for k in ("short_factor", "long_factor")}
        found["attention_factor"] = _longrope_factor(given, found["factor"], original)
    return found


def _rotated(head_dim: int, partial: float, file: ConfigFile, where: str) -> int:
    """Return the number of a head's elements that are rotated."""
    if partial != 1.0 and not file.partial_rotary:
        raise WgradError(f"{where}: partial_rotary_factor {partial} is not supported: only 1.0 is")
    rotated = int(head_dim * partial)
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise WgradError(
            f"{where}: partial_rotary_factor must leave an even number of a head's {head_dim} numbers to be rotated, 2 "
            f"at least; got {partial}: {FETCH}"
        )
    return rotated


def _needed(given: RopeFile, key: str, kind: str, where: str) -> float:
    value: float | None = getattr(given, key)
    if value is None:
        raise WgradError(f"{where}: rope_type {kind!r} needs {key}, a number above 0; got none: {FETCH}")
    return value


def _factors(given: RopeFile, key: str, head_dim: int, where: str) -> tuple[float, ...]:
    values = getattr(given, key) or []
    if len(values) != head_dim // 2:
        raise WgradError(
            f"{where}: rope_type 'longrope' needs {key}, a number for each of the {head_dim // 2} pairs of a head; got "
            f"{len(values)}: {FETCH}"
        )
    return tuple(values)


def _longrope_factor(given: RopeFile, factor: float, original: int) -> float:
    if given.attention_factor is not None:
        return given.attention_factor
    return 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """Return yarn's factor of cos and sin for positions that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_factor(given: RopeFile, factor: float) -> float:
    if given.attention_factor is not None:
        return given.attention_factor
    weight, over = given.mscale, given.mscale_all_dim
    return yarn_factor(factor, weight) / yarn_factor(factor, over) if weight and over else yarn_factor(factor)


def inverse_frequencies(config: RopeConfig, positions: int = 0) -> np.ndarray:
    """Return the inverse frequencies, float32 [head_dim / 2]: the angle of pair i at position p is p times element i.

    positions: length of the sequence, for types that depend on it.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    original, theta = config.original_max_position_embeddings, np.float64(config.theta)
    if config.type == "dynamic" and positions > original and config.head_dim > 2:  # one pair has period 1
        stretch = config.factor * positions / original - (config.factor - 1)
        theta *= stretch ** (config.head_dim / (config.head_dim - 2))
    with np.errstate(over="ignore"):  # a pair with an infinite period is not rotated, which is right
        # Rounding once from float64 equals PyTorch in 99 of 100 values; NumPy's float32 power differs in 1 of 6.
        periods = np.power(np.float64(np.float32(theta)), exponent, dtype=np.float64).astype(np.float32)
    if config.type == "longrope":
        periods = periods * np.array(config.long_factor if positions > original else config.short_factor, np.float32)
    inverse: np.ndarray = (np.float32(1) / periods).astype(np.float32)
    if config.type == "proportional":
        inverse[config.turned :] = 0
    if config.type in ("linear", "proportional"):
        values: np.ndarray = inverse / np.float32(config.factor)
        return values
    if config.type == "llama3":
        return _llama3(inverse, config)
    if config.type == "yarn":
        return _yarn(periods, config)
    return inverse


def _llama3(inverse: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, and interpolate those in between."""
    original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    one = np.float32(1)  # as PyTorch, which divides a number by a tensor by multiplying with the reciprocal
    wavelength = one / inverse * np.float32(2 * math.pi)
    stretched = inverse / np.float32(config.factor)
    scaled = np.where(wavelength > np.float32(original / low), stretched, inverse)
    if low == high:  # Llama 4 Scout's, where no wavelength is in between
        return scaled
    smooth = (one / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * inverse / np.float32(config.factor) + smooth * inverse
    inside = (wavelength >= np.float32(original / high)) & (wavelength <= np.float32(original / low))
    return np.where(inside, between, scaled).astype(np.float32)


def _yarn(periods: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Keep pairs that turn more than beta_fast times over the trained length, and stretch those below beta_slow."""
    dim = config.head_dim

    def correction(rotations: float) -> float:
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = correction(config.beta_fast), correction(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept, one = 1 - ramp, np.float32(1)
    values: np.ndarray = one / (np.float32(config.factor) * periods) * (1 - kept) + one / periods * kept
    return values


def depends_on_length(config: RopeConfig, longest: int) -> bool:
    """Return whether angles differ between sequences of up to `longest` tokens."""
    return config.type in ("dynamic", "longrope") and longest > config.original_max_position_embeddings


def rope_tables(config: RopeConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float32 [positions, head_dim / 2], with the attention factor.

    Row p is for the last token of a sequence of p + 1 tokens: in generation, as in transformers, a token has the angles
    for the text's length at that time.
    """
    numbers = np.arange(positions, dtype=np.int32)
    return rope_rows(config, numbers, numbers + 1)


def rope_rows(config: RopeConfig, positions: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, as `rope_tables`, for tokens at `positions` [n] in sequences of `lengths` [n] tokens."""
    longest = int(lengths.max(initial=0))
    if not depends_on_length(config, longest):
        frequencies, kinds = inverse_frequencies(config)[None], np.zeros(len(lengths), np.int64)
    else:
        original = config.original_max_position_embeddings
        beyond = lengths if config.type == "dynamic" else longest
        unlike, kinds = np.unique(np.where(lengths > original, beyond, 0), return_inverse=True)
        frequencies = np.stack([inverse_frequencies(config, int(length)) for length in unlike])
    wide = (positions.astype(np.float32)[:, None] * frequencies[kinds]).astype(np.float64)
    factor = config.attention_factor
    sine = np.sin(wide) * (-factor if config.backwards else factor)
    return (np.cos(wide) * factor).astype(np.float32), sine.astype(np.float32)


def grown(table: np.ndarray, growth: float, length: int) -> np.ndarray:
    """Scale row p of a table [positions, pairs] by 1 + growth log(1 + floor(p / length)).

    Source: Ministral 3 in transformers, which takes it from Llama 4.
    """
    scale = 1 + growth * np.log1p(np.arange(len(table)) // length)
    return (table * scale[:, None]).astype(np.float32)
