"""Rotary position tables: default, linear, llama3 and yarn scaling, in the numbers that transformers uses.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); Llama 3.1's frequency scaling as described in
transformers' modeling_rope_utils. The inverse frequencies and angles are rounded to float32 where they are
there, because that is what the models were trained with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, show
from wgrad.train.model.config_file import ConfigFile, RopeFile

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Scaling of the rotary embedding. Fields that a type does not use keep their defaults."""

    head_dim: int
    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def parse_rope(file: ConfigFile, head_dim: int, where: str) -> RopeConfig:
    """RoPE of a config.json: `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling` (4)."""
    given = file.rope_scaling or file.rope_parameters or RopeFile()
    kind = given.rope_type or given.type or "default"
    if kind not in ROPE_TYPES:
        raise WgradError(f"{where}: rope_type {show(kind)} is not supported: {', '.join(ROPE_TYPES)} are")
    partial = given.partial_rotary_factor or file.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise WgradError(f"{where}: partial_rotary_factor {partial} is not supported: only 1.0 is")
    config: dict[str, Any] = {
        "head_dim": head_dim,
        "theta": given.rope_theta or file.rope_theta or file.default_theta,
        "type": kind,
    }
    if kind == "default":
        return RopeConfig(**config)
    positions = file.max_position_embeddings
    original = file.original_max_position_embeddings or given.original_max_position_embeddings or positions
    config["original_max_position_embeddings"] = original
    if kind == "yarn" and given.factor is None:
        config["factor"] = positions / original
    else:
        config["factor"] = _needed(given, "factor", kind, where)
    if kind == "llama3":
        config |= {k: _needed(given, k, kind, where) for k in ("low_freq_factor", "high_freq_factor")}
        low, high = config["low_freq_factor"], config["high_freq_factor"]
        if low >= high:
            raise WgradError(f"{where}: high_freq_factor must be above low_freq_factor; got {high} and {low}: {FETCH}")
    if kind == "yarn":
        config |= {"beta_fast": given.beta_fast or 32.0, "beta_slow": given.beta_slow or 1.0}
        config |= {"truncate": given.truncate, "attention_factor": _yarn_factor(given, config["factor"])}
    return RopeConfig(**config)


def _needed(given: RopeFile, key: str, kind: str, where: str) -> float:
    value = getattr(given, key)
    if value is None:
        raise WgradError(f"{where}: rope_type {kind!r} needs {key}, a number above 0; got none: {FETCH}")
    return value


def _yarn_factor(given: RopeFile, factor: float) -> float:
    if given.attention_factor is not None:
        return given.attention_factor

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    weight, over = given.mscale, given.mscale_all_dim
    return mscale(factor, weight) / mscale(factor, over) if weight and over else mscale(factor)


def inverse_frequencies(config: RopeConfig) -> np.ndarray:
    """float32 [head_dim / 2]: angle of pair i at position p is p times element i."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    periods = np.power(np.float32(config.theta), exponent, dtype=np.float32)
    inverse = (np.float32(1) / periods).astype(np.float32)
    if config.type == "linear":
        return inverse / np.float32(config.factor)
    if config.type == "llama3":
        return _llama3(inverse, config)
    if config.type == "yarn":
        return _yarn(inverse, config)
    return inverse


def _llama3(inverse: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse.astype(np.float64)
    smooth = (original / wavelength - low) / (high - low)
    between = ((1 - smooth) / config.factor + smooth) * inverse
    scaled = np.where(wavelength > original / low, inverse / config.factor, inverse)
    inside = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(inside, between, scaled).astype(np.float32)


def _yarn(inverse: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Pairs that turn more than beta_fast times over the trained length are kept, fewer than beta_slow stretched."""
    dim = config.head_dim

    def correction(rotations: float) -> float:
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = correction(config.beta_fast), correction(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return (inverse / config.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def rope_tables(config: RopeConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin float32 [positions, head_dim / 2], yarn's attention factor included."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(config)[None, :]
    wide = angles.astype(np.float64)
    factor = config.attention_factor
    return (np.cos(wide) * factor).astype(np.float32), (np.sin(wide) * factor).astype(np.float32)
