"""Every operator that has a gradient, as a function on Tensors; the others are methods of a device.

Constants (positions, ids, targets, doc_start, seeds, frozen weights) are arrays of the device; what may have
a gradient is a Tensor. Weights may be either.
"""

from __future__ import annotations

import numpy as np

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.ops import activation, elementwise
from wgrad.autograd.ops import attention as _attention
from wgrad.autograd.ops import dropout as _dropout
from wgrad.autograd.ops import embedding as _embedding
from wgrad.autograd.ops import gemm as _gemm
from wgrad.autograd.ops import linear as _linear
from wgrad.autograd.ops import loss as _loss
from wgrad.autograd.ops import norm as _norm
from wgrad.autograd.ops import rope as _rope
from wgrad.autograd.ops import softmax as _softmax
from wgrad.autograd.ops.lora import LoraTerm
from wgrad.autograd.tensor import Tensor, no_grad, parameter
from wgrad.device.contract import Array, Device, DType
from wgrad.device.formats.frozen_weight import FrozenWeight

__all__ = [
    "LoraTerm", "Tensor", "add", "attention", "bias", "cast", "checkpoint", "dropout", "embedding", "geglu", "gelu",
    "gemm", "linear", "linear_cross_entropy", "linear_quantized", "mask", "mul", "no_grad", "parameter", "rms_norm",
    "rms_norm_residual", "rope", "scale", "silu", "softmax", "sum", "swiglu",
]  # fmt: skip

Weight = Tensor | Array


# ---- products ----------------------------------------------------------------------------
def gemm(
    a: Tensor, b: Weight, *, trans_a: bool = False, trans_b: bool = False, alpha: float = 1.0, dtype: DType = None
) -> Tensor:
    """alpha * op(a) op(b): [M, K] (trans_a: [K, M]) times [K, N] (trans_b: [N, K]); a leading batch axis on both."""
    return _gemm.Gemm.apply(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, dtype=dtype)


def linear(
    x: Tensor,
    weight: Weight,
    *,
    bias: Weight | None = None,
    residual: Tensor | None = None,
    lora: LoraTerm | None = None,
    dtype: DType = None,
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, + LoRA + bias [N] + residual [..., N] -> [..., N]."""
    a, b = (None, None) if lora is None else (lora.a, lora.b)
    return _linear.Linear.apply(x, weight, bias, residual, a, b, op="linear", lora=lora, dtype=dtype)


def linear_quantized(
    x: Tensor,
    weight: FrozenWeight,
    *,
    bias: Weight | None = None,
    residual: Tensor | None = None,
    lora: LoraTerm | None = None,
    dtype: DType = None,
) -> Tensor:
    """`linear` on a frozen weight of some format (device/formats), decoded inside the product."""
    a, b = (None, None) if lora is None else (lora.a, lora.b)
    return _linear.Linear.apply(x, weight, bias, residual, a, b, op="linear_quantized", lora=lora, dtype=dtype)


# ---- norms, activations, rotary, attention -----------------------------------------------
def rms_norm(x: Tensor, weight: Weight, eps: float, *, dtype: DType = None) -> Tensor:
    """x [..., C], weight float32 [C] -> x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return _norm.RMSNorm.apply(x, weight, eps=eps, dtype=dtype)


def rms_norm_residual(h: Tensor, weight: Weight, eps: float, *, dtype: DType = None) -> tuple[Tensor, Tensor]:
    """-> norm(h), h. Use the second output from here on: its gradient is added inside the norm's backward."""
    return _norm.RMSNormResidual.apply(h, weight, eps=eps, dtype=dtype)


def silu(x: Tensor) -> Tensor:
    return activation.Silu.apply(x)


def gelu(x: Tensor) -> Tensor:
    """The tanh form."""
    return activation.Gelu.apply(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return activation.SwiGLU.apply(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return activation.GeGLU.apply(gate, up)


def rope(x: Tensor, cos: Array, sin: Array, positions: Array) -> Tensor:
    """x [N, H, D], cos and sin float32 [P, D/2], positions int32 [N]; half-split."""
    return _rope.Rope.apply(x, cos=cos, sin=sin, positions=positions)


def attention(
    q: Tensor, k: Tensor, v: Tensor, doc_start: Array, cache_len: Array, *, scale: float, window: int = 0
) -> Tensor:
    """Causal attention; the mask is described at `Device.attention`. A gradient needs T = S and cache_len = 0."""
    return _attention.Attention.apply(q, k, v, doc_start=doc_start, cache_len=cache_len, scale=scale, window=window)


# ---- embedding, loss ---------------------------------------------------------------------
def embedding(table: Weight, ids: Array, *, dtype: DType = np.float32, device: Device | None = None) -> Tensor:
    """table [V, C], ids int32 [N] -> [N, C]. `device` is needed when the table is not a Tensor."""
    return _embedding.Embedding.apply(table, ids=ids, dtype=dtype, device=device)


def linear_cross_entropy(x: Tensor, weight: Weight, targets: Array) -> Tensor:
    """x [N, C], weight [V, C], targets int32 [N] (-100 ignored) -> loss float32 [1], summed over the targets."""
    return _loss.LinearCrossEntropy.apply(x, weight, targets=targets)


# ---- plain operators ---------------------------------------------------------------------
def add(a: Tensor, b: Weight) -> Tensor:
    return elementwise.Add.apply(a, b)


def mul(a: Tensor, b: Weight) -> Tensor:
    return elementwise.Mul.apply(a, b)


def scale(x: Tensor, alpha: float) -> Tensor:
    return elementwise.Scale.apply(x, alpha=alpha)


def cast(x: Tensor, dtype: DType) -> Tensor:
    return elementwise.Cast.apply(x, dtype=dtype)


def bias(x: Tensor, b: Weight) -> Tensor:
    """x [..., C] + b float32 [C]."""
    return elementwise.Bias.apply(x, b)


def sum(x: Tensor) -> Tensor:
    """All elements -> float32 [1]."""
    return elementwise.Sum.apply(x)


def mask(x: Tensor, keep: Array, value: float) -> Tensor:
    """x where keep (uint32, same shape) is non-zero, else value."""
    return elementwise.Mask.apply(x, keep=keep, value=value)


def softmax(x: Tensor) -> Tensor:
    """Over the last axis."""
    return _softmax.Softmax.apply(x)


def dropout(x: Tensor, p: float, seed: Array, stream: int) -> Tensor:
    """Keep with probability 1 - p, divide by 1 - p; seed uint32 [2], stream a number of this layer's own."""
    return _dropout.Dropout.apply(x, p=p, seed=seed, stream=stream)
