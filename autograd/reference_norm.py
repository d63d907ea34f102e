"""Reference RMSNorm, gated activations, rotary embedding and softmax: forward and backward side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, up

# The tanh form of GELU (Hendrycks and Gimpel, 2016): 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
GELU_SCALE = 0.7978845608028654
GELU_CUBIC = 0.044715


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinity, and 1 / infinity the right 0
        return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative."""
    s = sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative. (1 + tanh(z)) / 2 is written as sigmoid(2 z), which keeps its digits for negative x."""
    inner = 2 * GELU_SCALE * (x + GELU_CUBIC * x * x * x)
    slope = 2 * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
    s = sigmoid(inner)
    return x * s, s + x * s * (1 - s) * slope


class ReferenceNorm:
    @operator
    def rms_norm(
        self, x: np.ndarray, weight: np.ndarray, eps: float, *, dtype: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        compute = compute_dtype(x, weight)
        wide = up(x, compute)
        rstd = 1 / np.sqrt(np.mean(wide * wide, axis=1) + compute.type(eps))
        y = wide * rstd[:, None] * up(weight, compute)
        return finish(y, x.dtype if dtype is None else dtype, compute), rstd

    @operator
    def rms_norm_backward(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        weight: np.ndarray,
        rstd: np.ndarray,
        *,
        residual_grad: np.ndarray | None = None,
        need_dweight: bool = True,
        dtype: Any = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        compute = compute_dtype(dy, x, weight, rstd, residual_grad)
        grad, normed = up(dy, compute), up(x, compute) * up(rstd, compute)[:, None]
        weighted = grad * up(weight, compute)
        dx = (weighted - normed * np.mean(weighted * normed, axis=1, keepdims=True)) * up(rstd, compute)[:, None]
        if residual_grad is not None:
            dx += up(residual_grad, compute)
        dweight = np.sum(grad * normed, axis=0) if need_dweight else None
        return finish(dx, x.dtype if dtype is None else dtype, compute), dweight

    @operator
    def silu(self, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x)
        return finish(_silu(up(x, compute))[0], x.dtype, compute)

    @operator
    def silu_backward(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(dy, x)
        return finish(up(dy, compute) * _silu(up(x, compute))[1], x.dtype, compute)

    @operator
    def gelu(self, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x)
        return finish(_gelu(up(x, compute))[0], x.dtype, compute)

    @operator
    def gelu_backward(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(dy, x)
        return finish(up(dy, compute) * _gelu(up(x, compute))[1], x.dtype, compute)

    @operator
    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return _gated(_silu, gate, up)

    @operator
    def swiglu_backward(self, dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _gated_backward(_silu, dy, gate, up)

    @operator
    def geglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return _gated(_gelu, gate, up)

    @operator
    def geglu_backward(self, dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _gated_backward(_gelu, dy, gate, up)

    @operator
    def rope(
        self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, *, inverse: bool = False
    ) -> np.ndarray:
        return rotate(x, cos, sin, positions, inverse)

    @operator
    def softmax(self, x: np.ndarray) -> np.ndarray:
        compute = compute_dtype(x)
        wide = up(x, compute)
        e = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return finish(e / e.sum(axis=-1, keepdims=True), x.dtype, compute)

    @operator
    def softmax_backward(self, dy: np.ndarray, y: np.ndarray) -> np.ndarray:
        compute = compute_dtype(dy, y)
        grad, out = up(dy, compute), up(y, compute)
        return finish(out * (grad - np.sum(grad * out, axis=-1, keepdims=True)), dy.dtype, compute)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, inverse: bool = False) -> np.ndarray:
    """x [N, H, D], cos and sin [P, D/2], positions [N] -> [N, H, D] in x's dtype (the oracle's where one is wider)."""
    compute = compute_dtype(x, cos, sin)
    half = x.shape[-1] // 2
    c, s = up(cos, compute)[positions][:, None, :], up(sin, compute)[positions][:, None, :]
    if inverse:
        s = -s
    first, second = up(x[..., :half], compute), up(x[..., half:], compute)
    return finish(np.concatenate([first * c - second * s, second * c + first * s], axis=-1), x.dtype, compute)


def _gated(act: Any, gate: np.ndarray, value: np.ndarray) -> np.ndarray:
    compute = compute_dtype(gate, value)
    return finish(act(up(gate, compute))[0] * up(value, compute), gate.dtype, compute)


def _gated_backward(act: Any, dy: np.ndarray, gate: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    compute = compute_dtype(dy, gate, value)
    grad, (activated, slope) = up(dy, compute), act(up(gate, compute))
    dgate = finish(grad * up(value, compute) * slope, gate.dtype, compute)
    return dgate, finish(grad * activated, value.dtype, compute)
