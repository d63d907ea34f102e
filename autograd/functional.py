"""Every operator that has a gradient, as a function on Tensors; the others are methods of a device.

Constants (positions, ids, targets, doc_start, seeds, frozen weights) are arrays of the device; what may have
a gradient is a Tensor. Weights may be either.
"""

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.ops.activation import geglu, gelu, silu, swiglu
from wgrad.autograd.ops.attention import attention
from wgrad.autograd.ops.dora import dora_scale
from wgrad.autograd.ops.dropout import dropout
from wgrad.autograd.ops.elementwise import add, bias, cast, mask, mul, scale, sum
from wgrad.autograd.ops.embedding import embedding
from wgrad.autograd.ops.gemm import gemm
from wgrad.autograd.ops.linear import linear, linear_quantized
from wgrad.autograd.ops.log_odds import log_odds
from wgrad.autograd.ops.lora import LoraTerm
from wgrad.autograd.ops.loss import linear_cross_entropy
from wgrad.autograd.ops.norm import layer_norm, rms_norm, rms_norm_residual
from wgrad.autograd.ops.rope import rope, rope_split
from wgrad.autograd.ops.softmax import softmax
from wgrad.autograd.tensor import Tensor, no_grad, parameter

__all__ = [
    "LoraTerm", "Tensor", "add", "attention", "bias", "cast", "checkpoint", "dora_scale", "dropout", "embedding",
    "geglu", "gelu", "gemm", "layer_norm", "linear", "linear_cross_entropy", "linear_quantized", "log_odds", "mask",
    "mul", "no_grad", "parameter", "rms_norm", "rms_norm_residual", "rope", "rope_split", "scale", "silu", "softmax",
    "sum", "swiglu",
]  # fmt: skip
