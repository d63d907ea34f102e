"""Every operator that has a gradient, as a function on Tensors; the others are methods of a device.

The elementwise functions, `where`, `cat`, `matmul` and `cross_entropy` broadcast as PyTorch's do, and are also methods
of a Tensor where PyTorch has them. Those of an operator's name take arguments as the operator does.

Constants (positions, ids, targets, doc_start, seeds, frozen weights) are arrays of the device; what may have
a gradient is a Tensor. Weights may be either.
"""

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.ops.activation import geglu, gelu, silu, swiglu
from wgrad.autograd.ops.arithmetic import (
    abs,
    cos,
    exp,
    expm1,
    log,
    maximum,
    minimum,
    relu,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
)
from wgrad.autograd.ops.attention import attention
from wgrad.autograd.ops.causal_attention import causal_attention
from wgrad.autograd.ops.cross_entropy import cross_entropy
from wgrad.autograd.ops.delta_rule import delta_rule
from wgrad.autograd.ops.dora import dora_scale
from wgrad.autograd.ops.dropout import dropout
from wgrad.autograd.ops.elementwise import add, bias, cast, mask, mul, scale, sum
from wgrad.autograd.ops.embedding import embedding
from wgrad.autograd.ops.gemm import gemm
from wgrad.autograd.ops.grouped import grouped_linear
from wgrad.autograd.ops.linear import linear, linear_quantized
from wgrad.autograd.ops.log_odds import log_odds
from wgrad.autograd.ops.lora import LoraTerm
from wgrad.autograd.ops.loss import linear_cross_entropy
from wgrad.autograd.ops.matmul import matmul
from wgrad.autograd.ops.movement import cat, stack
from wgrad.autograd.ops.norm import layer_norm, rms_norm, rms_norm_residual
from wgrad.autograd.ops.rope import rope, rope_split
from wgrad.autograd.ops.routing import Groups, combine, route
from wgrad.autograd.ops.short_conv import short_conv
from wgrad.autograd.ops.softmax import softmax
from wgrad.autograd.ops.ssd import ssd
from wgrad.autograd.tensor import Tensor, no_grad, parameter

__all__ = [
    "Groups", "LoraTerm", "Tensor", "abs", "add", "attention", "bias", "cast", "cat", "causal_attention",
    "checkpoint", "combine", "cos", "cross_entropy", "delta_rule", "dora_scale", "dropout", "embedding", "exp",
    "expm1", "geglu", "gelu", "gemm", "grouped_linear", "layer_norm", "linear", "linear_cross_entropy",
    "linear_quantized", "log", "log_odds", "mask", "matmul", "maximum", "minimum", "mul", "no_grad", "parameter",
    "relu", "rms_norm", "rms_norm_residual", "rope", "rope_split", "route", "scale", "short_conv", "sigmoid",
    "silu", "sin", "softmax", "softplus", "sqrt", "ssd", "stack", "sum", "swiglu", "tanh", "where",
]  # fmt: skip
