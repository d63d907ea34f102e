"""All operators with a gradient, as functions on Tensors; other operators are methods of a device.

The elementwise functions, `where`, `cat`, `matmul` and `cross_entropy` broadcast like PyTorch's, and are also methods
of Tensors if PyTorch has them. Functions with the name of an operator take the same arguments.

Constants (positions, ids, targets, doc_start, seeds, frozen weights) are arrays of the device; arguments that may have
a gradient are Tensors. Weights may be either.
"""

from typing import Any

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.ops.activation import geglu, silu, swiglu
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
from wgrad.autograd.ops.einsum import einsum
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
from wgrad.autograd.ops.reduction import log_softmax, softmax
from wgrad.autograd.ops.rope import rope, rope_split
from wgrad.autograd.ops.routing import Groups, combine, route
from wgrad.autograd.ops.selective_scan import selective_scan
from wgrad.autograd.ops.short_conv import short_conv
from wgrad.autograd.ops.ssd import ssd
from wgrad.autograd.ops.torch_functions import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_similarity,
    dropout,
    elu,
    gelu,
    huber_loss,
    l1_loss,
    leaky_relu,
    mse_loss,
    nll_loss,
    normalize,
    one_hot,
    pad,
    smooth_l1_loss,
)
from wgrad.autograd.ops.torch_layers import avg_pool2d, conv2d, max_pool2d, scaled_dot_product_attention
from wgrad.autograd.tensor import Tensor, no_grad, parameter
from wgrad.autograd.torch_names import instead_in_functional

__all__ = [
    "Groups", "LoraTerm", "Tensor", "abs", "add", "attention", "avg_pool2d", "bias", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "cast", "cat", "causal_attention", "checkpoint", "combine", "conv2d", "cos",
    "cosine_similarity", "cross_entropy", "delta_rule", "dora_scale", "dropout", "einsum", "elu", "embedding", "exp",
    "expm1", "geglu", "gelu", "gemm", "grouped_linear", "huber_loss", "l1_loss", "layer_norm", "leaky_relu", "linear",
    "linear_cross_entropy", "linear_quantized", "log", "log_odds", "log_softmax", "mask", "matmul", "max_pool2d",
    "maximum", "minimum", "mse_loss", "mul", "nll_loss", "no_grad", "normalize", "one_hot", "pad", "parameter",
    "relu", "rms_norm", "rms_norm_residual", "rope", "rope_split", "route", "scale", "scaled_dot_product_attention",
    "selective_scan", "short_conv", "sigmoid", "silu", "sin", "smooth_l1_loss", "softmax", "softplus", "sqrt", "ssd",
    "stack", "sum", "swiglu", "tanh", "where",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise AttributeError(f"wgrad.functional has no {name!r}" + instead_in_functional(name, __all__, Tensor))
