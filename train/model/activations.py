"""Activations of MLPs by their names in `ModelConfig`. Those defined here are expressions that run in one launch.

Sources: squared ReLU, So et al., Primer (arXiv 2109.08668); GELU's short form, Hendrycks and Gimpel (arXiv
1606.08415); xIELU, Huang and Schlag (arXiv 2411.13010).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor

_BETA, _EPS = 0.5, -1e-6  # beta and eps of xIELU, as in weights.constants


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0) ** 2."""
    positive = F.relu(x)
    return positive * positive


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x)."""
    return x * F.sigmoid(x * 1.702)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, *, dtype: Any) -> Tensor:
    """Return softplus(alpha_p) x ** 2 + x / 2 where x > 0, else (0.5 + softplus(alpha_n)) (exp(x) - 1 - x) + x / 2.

    Args:
        x: Any shape.
        alpha_p, alpha_n: Shape [1].
        dtype: Dtype of the output.
    """
    curve = _softplus(alpha_p) * x * x
    decay = (_softplus(alpha_n) + _BETA) * (F.expm1(F.minimum(x, _EPS)) - x)
    return (F.where(x > 0.0, curve, decay) + x * _BETA).to(dtype)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), for x up to 88."""
    return F.log(F.exp(x) + 1.0)


def gated(act: str, kept: bool, *parts: Tensor) -> Tensor:
    """Return gate, activated, times up.

    Args:
        act: Name of the activation.
        kept: Whether operators that read the output save it. Else the backward recomputes it from gate and up.
        *parts: Gate and up, or one Tensor with both side by side.
    """
    y = GATED[act](*parts)
    if kept and y.node is not None:
        y.node.recomputed = None
    return y


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": F.gelu,
    "gelu": partial(F.gelu, approximate="none"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
}


def _gated(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return gate, activated, times up. Without `up`: gate has both side by side."""
    if up is None:
        gate, up = gate.split(gate.shape[1] // 2, 1)
    return PLAIN[act](gate) * up


GATED: dict[str, Callable[..., Tensor]] = {act: partial(_gated, act) for act in PLAIN}
GATED |= {"silu": F.swiglu, "gelu_tanh": F.geglu}  # each one operator, also in the backward
