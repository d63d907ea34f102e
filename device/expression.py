"""Expressions that the operator `fused` computes: programs of elementwise functions, each in NumPy and in WGSL.

A program is a tuple of instructions. An operand is the number of an earlier instruction, and the last one is the value.

    ("load", k)     an element of array k, by its view
    ("scalar", k)   scalar k
    ("index", d)    the coordinate along axis d
    ("old",)        the previous value of the output
    (name, *operands)   a function of `FUNCTIONS`
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.exact_gelu import WGSL as EXACT_GELU
from wgrad.device.exact_gelu import gelu_exact, gelu_exact_slope

Instruction = tuple[Any, ...]
Program = tuple[Instruction, ...]
View = tuple[tuple[int, ...], int]  # strides and offset, in elements

SOURCES = {"load": 1, "scalar": 1, "index": 1, "old": 0}  # number of operands, which are not instructions
MOST_ARRAYS = 7  # with the output, the storage buffers that a shader has on every WebGPU device
MOST_SCALARS = 40  # with shapes and strides, they fit into the uniform of a launch
MOST_AXES = 8
REDUCTIONS = ("", "sum", "max")


@dataclass(frozen=True)
class ElementwiseFunction:
    """A function of each element.

    arity: number of operands. numpy: the reference. wgsl: an expression of f32 with operands $0, $1, ...
    helper: WGSL functions that it calls; functions of one name must have the same text.
    """

    arity: int
    numpy: Callable[..., Any]
    wgsl: str
    helper: str = ""


_GELU_TWICE, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


def _gelu_gate(x: np.ndarray) -> Any:
    """Return gelu(x) / x: the tanh form written with a sigmoid, which keeps its digits for negative x."""
    t = x.dtype.type
    return _sigmoid(t(_GELU_TWICE) * x * (1 + t(_GELU_CUBE) * x * x))


def _gelu_slope(x: np.ndarray) -> Any:
    t, s = x.dtype.type, _gelu_gate(x)
    return s + x * s * (1 - s) * (t(_GELU_TWICE) * (1 + t(3 * _GELU_CUBE) * x * x))


def _silu_slope(x: np.ndarray) -> Any:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _compared(compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: compare(x, y).astype(np.result_type(x, y))


_POWER = """
fn power(x: f32, y: f32) -> f32 {
  let size = exp2(y * log2(abs(x)));
  let whole = floor(y) == y;
  let odd = whole && floor(y * 0.5) * 2.0 != y;
  let signed = select(select(log(min(x, -1.0)), size, whole), -size, odd);
  return select(select(select(size, signed, x < 0.0), select(0.0, 1.0 / abs(x), y < 0.0), x == 0.0), 1.0, y == 0.0);
}
"""
# exp of at most 87 stays finite in float32.
_SIGMOID = "fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(min(-x, 87.0))); }\n"
# log(1 + e) of a small e from its series, since 1 + e would lose digits of e.
_SOFTPLUS = """
fn softplus(x: f32) -> f32 {
  let e = exp(-abs(x));
  let after = 1.0 / 4.0 - e * (1.0 / 5.0 - e * (1.0 / 6.0 - e / 7.0));
  let series = e * (1.0 - e * (1.0 / 2.0 - e * (1.0 / 3.0 - e * after)));
  return max(x, 0.0) + select(log(1.0 + e), series, e < 0.1);
}
"""
_SILU = (
    _SIGMOID
    + """fn silu_slope(x: f32) -> f32 { let s = sigmoid(x); return s * (1.0 + x * (1.0 - s)); }
"""
)
_GELU = (
    _SIGMOID
    + f"""fn gelu_gate(x: f32) -> f32 {{ return sigmoid({_GELU_TWICE!r} * x * (1.0 + {_GELU_CUBE!r} * x * x)); }}
fn gelu_slope(x: f32) -> f32 {{
  let s = gelu_gate(x);
  return s + x * s * (1.0 - s) * ({_GELU_TWICE!r} * (1.0 + {3 * _GELU_CUBE!r} * x * x));
}}
"""
)

# For small x the series of exp without its first term, since the difference would lose digits.
_EXPM1 = """
fn expm1(x: f32) -> f32 {
  let series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * 0.0013888889)))));
  return select(exp(x) - 1.0, series, abs(x) < 0.3);
}
"""

FUNCTIONS: dict[str, ElementwiseFunction] = {
    "add": ElementwiseFunction(2, np.add, "$0 + $1"),
    "sub": ElementwiseFunction(2, np.subtract, "$0 - $1"),
    "mul": ElementwiseFunction(2, np.multiply, "$0 * $1"),
    "div": ElementwiseFunction(2, np.divide, "$0 / $1"),
    "pow": ElementwiseFunction(2, np.power, "power($0, $1)", _POWER),
    "maximum": ElementwiseFunction(2, np.maximum, "max($0, $1)"),
    "minimum": ElementwiseFunction(2, np.minimum, "min($0, $1)"),
    "lt": ElementwiseFunction(2, _compared(np.less), "select(0.0, 1.0, $0 < $1)"),
    "le": ElementwiseFunction(2, _compared(np.less_equal), "select(0.0, 1.0, $0 <= $1)"),
    "gt": ElementwiseFunction(2, _compared(np.greater), "select(0.0, 1.0, $0 > $1)"),
    "ge": ElementwiseFunction(2, _compared(np.greater_equal), "select(0.0, 1.0, $0 >= $1)"),
    "eq": ElementwiseFunction(2, _compared(np.equal), "select(0.0, 1.0, $0 == $1)"),
    "ne": ElementwiseFunction(2, _compared(np.not_equal), "select(0.0, 1.0, $0 != $1)"),
    "where": ElementwiseFunction(3, lambda c, a, b: np.where(c != 0, a, b), "select($2, $1, $0 != 0.0)"),
    "neg": ElementwiseFunction(1, np.negative, "-($0)"),
    "exp": ElementwiseFunction(1, np.exp, "exp($0)"),
    "expm1": ElementwiseFunction(1, np.expm1, "expm1($0)", _EXPM1),
    "log": ElementwiseFunction(1, np.log, "log($0)"),
    "sqrt": ElementwiseFunction(1, np.sqrt, "sqrt($0)"),
    "abs": ElementwiseFunction(1, np.abs, "abs($0)"),
    "sign": ElementwiseFunction(1, np.sign, "sign($0)"),
    "sin": ElementwiseFunction(1, np.sin, "sin($0)"),
    "cos": ElementwiseFunction(1, np.cos, "cos($0)"),
    "relu": ElementwiseFunction(1, lambda x: np.maximum(x, x.dtype.type(0)), "max($0, 0.0)"),
    "tanh": ElementwiseFunction(1, np.tanh, "tanh_of_x($0)"),
    "sigmoid": ElementwiseFunction(1, _sigmoid, "sigmoid($0)", _SIGMOID),
    "softplus": ElementwiseFunction(1, lambda x: np.logaddexp(x, x.dtype.type(0)), "softplus($0)", _SOFTPLUS),
    "silu": ElementwiseFunction(1, lambda x: x * _sigmoid(x), "$0 * sigmoid($0)", _SIGMOID),
    "silu_slope": ElementwiseFunction(1, _silu_slope, "silu_slope($0)", _SILU),
    "gelu": ElementwiseFunction(1, lambda x: x * _gelu_gate(x), "$0 * gelu_gate($0)", _GELU),
    "gelu_slope": ElementwiseFunction(1, _gelu_slope, "gelu_slope($0)", _GELU),
    "gelu_exact": ElementwiseFunction(1, gelu_exact, "$0 * normal($0).x", EXACT_GELU),
    "gelu_exact_slope": ElementwiseFunction(1, gelu_exact_slope, "gelu_exact_slope($0)", EXACT_GELU),
}
BUILT_IN = frozenset(FUNCTIONS)


def add_function(name: str, function: ElementwiseFunction) -> None:
    """Enter a function under a new name. Raises WgradError if the name is taken or not an identifier."""
    if not re.fullmatch(r"[a-z]\w*", name):
        raise WgradError(f"the name of an operator is letters, digits and _, got {name!r}")
    if name in FUNCTIONS or name in SOURCES:
        raise WgradError(f"an operator is already called {name}; take another name")
    FUNCTIONS[name] = function


def evaluate(
    program: Program, arrays: Sequence[np.ndarray], scalars: Sequence[float], shape: Sequence[int], compute: np.dtype,
    old: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Evaluate a program in NumPy. arrays: already viewed, and in the compute dtype."""
    values: list[Any] = []
    for name, *operands in program:
        if name == "load":
            values.append(arrays[operands[0]])
        elif name == "scalar":
            values.append(np.asarray(scalars[operands[0]], compute))
        elif name == "index":
            axis = [1] * len(shape)
            axis[operands[0]] = shape[operands[0]]
            values.append(np.arange(shape[operands[0]], dtype=compute).reshape(axis))
        elif name == "old":
            values.append(old)
        else:
            values.append(FUNCTIONS[name].numpy(*(values[i] for i in operands)))
    result: np.ndarray = np.broadcast_to(values[-1], tuple(shape))
    return result


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
