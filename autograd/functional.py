"""Every operator as a function on Tensors, and the checked calls that have no gradient.

Constants (positions, ids, targets, doc_start, seeds, frozen weights, NF4Arrays) are arrays of the device; what may have
a gradient is a Tensor. Weights may be either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd import schema, schema_state
from wgrad.autograd.checked import as_nf4_array, unchecked
from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.ops import activation, elementwise
from wgrad.autograd.ops import attention as _attention
from wgrad.autograd.ops import embedding as _embedding
from wgrad.autograd.ops import gemm as _gemm
from wgrad.autograd.ops import linear as _nf4
from wgrad.autograd.ops import loss as _loss
from wgrad.autograd.ops import norm as _norm
from wgrad.autograd.ops import rope as _rope
from wgrad.autograd.ops.lora import LoraTerm, lora_inputs
from wgrad.autograd.tensor import Tensor, no_grad, parameter
from wgrad.device.contract import Array, Device, DType, NF4Array

__all__ = [
    "LoraTerm", "Tensor", "adamw", "add", "add_to", "attention", "bias", "cast", "checkpoint", "clip", "dropout",
    "embedding", "geglu", "gelu", "gemm", "grad_norm", "kv_append", "linear", "linear_cross_entropy", "linear_nf4",
    "mask", "mul", "nf4_dequantize", "nf4_quantize", "no_grad", "parameter", "rms_norm", "rms_norm_residual", "rope",
    "rope_append", "sample", "scale", "silu", "softmax", "sum", "swiglu",
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
    a, b, options = lora_inputs(lora)
    return _gemm.Linear.apply(x, weight, bias, residual, a, b, dtype=dtype, **options)


def linear_nf4(
    x: Tensor,
    weight: NF4Array,
    *,
    bias: Weight | None = None,
    residual: Tensor | None = None,
    lora: LoraTerm | None = None,
    dtype: DType = None,
) -> Tensor:
    """`linear` on a frozen NF4 weight, decoded inside the product."""
    a, b, options = lora_inputs(lora)
    return _nf4.LinearNF4.apply(x, bias, residual, a, b, weight=weight, dtype=dtype, **options)


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
    return elementwise.Softmax.apply(x)


def dropout(x: Tensor, p: float, seed: Array, stream: int) -> Tensor:
    """Keep with probability 1 - p, divide by 1 - p; seed uint32 [2], stream a number of this layer's own."""
    return elementwise.Dropout.apply(x, p=p, seed=seed, stream=stream)


# ---- without a gradient ------------------------------------------------------------------
def nf4_quantize(device: Device, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Array:
    """w [out, in] float32, float16 or bfloat16, value-compatible with bitsandbytes."""
    schema.nf4_quantize(device, w, block_size)
    return as_nf4_array(unchecked(device).nf4_quantize(w, block_size, double=double))


def nf4_dequantize(device: Device, w: NF4Array, dtype: DType = np.float32) -> Array:
    return unchecked(device).nf4_dequantize(w, schema.nf4_dequantize(device, w, dtype))


def kv_append(device: Device, cache: Array, new: Array, cache_len: Array, *, start: int | None = None) -> None:
    """cache [B, S, G, D] in place from cache_len[0] on = new [B, T, G, D].
    start: cache_len[0] where the host knows it."""
    schema.kv_append(device, cache, new, cache_len, start)
    unchecked(device).kv_append(cache, new, cache_len)


def rope_append(
    device: Device,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    keys: Array,
    values: Array,
    cache_len: Array,
    *,
    start: int | None = None,
) -> None:
    """`rope` of k [B T, G, D] and `kv_append` of that and of v to the caches keys, values [B, S, G, D], in one launch.
    start: cache_len[0] where the host knows it."""
    schema.rope_append(device, (k, v), (cos, sin, positions), (keys, values), cache_len, start)
    unchecked(device).rope_append(k, v, cos, sin, positions, keys, values, cache_len)


def add_to(device: Device, total: Array, x: Array) -> None:
    """total += x, in place."""
    schema.same_shape("add", device, total, x)
    device.add(total, x, out=total)


def grad_norm(device: Device, g: Array) -> Array:
    """Flat gradients [n] -> float32 [2]: sum of squares of the finite ones, number of the others."""
    schema_state.grad_norm(device, g)
    return unchecked(device).grad_norm(g)


def clip(
    device: Device, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float
) -> None:
    """`Device.clip`: decide on the device whether and how this step is applied."""
    schema_state.clip(device, norm, hyper, state, loss_scale)
    unchecked(device).clip(norm, hyper, state, loss_scale, beta1=beta1, beta2=beta2)


def adamw(
    device: Device,
    p: Array,
    g: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    hyper: Array,
    state: Array,
    *,
    decay_elements: int,
    **options: Any,
) -> None:
    """`Device.adamw` on flat buffers; options beta1, beta2, eps, weight_decay."""
    arrays = {"p": p, "g": g, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "hyper": hyper, "state": state}
    schema_state.adamw(device, arrays, decay_elements)
    unchecked(device).adamw(p, g, exp_avg, exp_avg_sq, hyper, state, decay_elements=decay_elements, **options)


def sample(
    device: Device,
    logits: Array,
    uniform: Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Array:
    """logits float32 [V], uniform float32 [1] -> id int32 [1]; see `Device.sample`."""
    schema_state.sample(device, logits, uniform, temperature, top_k, top_p)
    return unchecked(device).sample(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p)
