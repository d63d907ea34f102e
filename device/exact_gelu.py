"""GELU with the normal distribution function, x P(X <= x), and its derivative, in NumPy and in WGSL.

In float32, P(X <= -a) = exp(-a^2 / 2) p(q) / (a + 3.5), with q = (a - 3.5) / (a + 3.5). The polynomial p has a relative
error of 8e-9 up to a = 15, where the probability is 0 in float32. hip/elementwise/fused.hip has the same numbers.
Sources: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shepherd and Laframboise (1981) for the form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_MIDDLE, _LARGEST, _DENSITY = 3.5, 15.0, 1 / math.sqrt(2 * math.pi)
# Minimax coefficients by Remez' algorithm, the highest power first.
_POLYNOMIAL = (
    0.000108691447, 0.000418320154, -0.000495038125, -0.00317282557, 0.00649372649, 0.0174058202, -0.116053175,
    0.315425091, -0.565561739, 0.744416074,
)  # fmt: skip
_erfc = np.frompyfunc(math.erfc, 1, 1)


def _normal(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P(X <= x) and exp(-x^2 / 2)."""
    if x.dtype == np.float64:
        return np.asarray(_erfc(-x / math.sqrt(2)), np.float64) / 2, np.exp(-0.5 * np.minimum(np.abs(x), 40) ** 2)
    t = x.dtype.type
    a = np.minimum(np.abs(x), t(_LARGEST))
    bell = np.exp(t(-0.5) * a * a)
    q, p = (a - t(_MIDDLE)) / (a + t(_MIDDLE)), t(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * q + t(coefficient)
    tail = bell * p / (a + t(_MIDDLE))
    return np.where(x < 0, tail, 1 - tail), bell


def gelu_exact(x: np.ndarray) -> Any:
    return x * _normal(x)[0]


def gelu_exact_slope(x: np.ndarray) -> Any:
    below, bell = _normal(x)
    return below + x * bell * x.dtype.type(_DENSITY)


def _horner() -> str:
    text = repr(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        text = f"({text}) * q + {coefficient!r}"
    return text


# P(X <= x) and exp(-x^2 / 2).
WGSL = f"""
fn normal(x: f32) -> vec2<f32> {{
  let a = min(abs(x), {_LARGEST!r});
  let bell = exp(-0.5 * a * a);
  let r = 1.0 / (a + {_MIDDLE!r});
  let q = (a - {_MIDDLE!r}) * r;
  let tail = bell * r * ({_horner()});
  return vec2<f32>(select(1.0 - tail, tail, x < 0.0), bell);
}}
fn gelu_exact_slope(x: f32) -> f32 {{ let n = normal(x); return n.x + x * n.y * {_DENSITY!r}; }}
"""
