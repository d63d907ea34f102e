"""Elementwise functions of Tensors with broadcasting, evaluated lazily: a chain of them runs in one launch (lazy.py).

A gradient is a lazy expression as well, so the backward of a chain is one launch per operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.host_arrays import to_device
from wgrad.autograd.lazy import Lazy, Operand, apply, broadcast, lazy_of, memory_of, summed_to, view_of
from wgrad.autograd.tensor import Node, Tensor, before_writing, edge_of, is_recording
from wgrad.autograd.tensor_methods import implements_method
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError, WgradError

Gradient = Callable[..., Sequence["Lazy | None"]]

# Gradients of the operands, as functions of the gradient of the output (dy) and the operands; for the functions in
# _OF_OUTPUT, of dy and the output.
GRADIENTS: dict[str, Gradient] = {
    "add": lambda dy, a, b: (dy, dy),
    "sub": lambda dy, a, b: (dy, -dy),
    "mul": lambda dy, a, b: (dy * b, dy * a),
    "div": lambda dy, a, b: (dy / b, -(dy * (a / b) / b)),  # b * b would be 0 for b below 1e-23
    "pow": lambda dy, a, b: (_slope_of_base(dy, a, b), dy * apply("pow", a, b) * _log_of_base(a)),
    "maximum": lambda dy, a, b: (dy * _share("gt", a, b), dy * _share("lt", a, b)),
    "minimum": lambda dy, a, b: (dy * _share("lt", a, b), dy * _share("gt", a, b)),
    "where": lambda dy, c, a, b: (None, apply("where", c, dy, 0.0), apply("where", c, 0.0, dy)),
    "neg": lambda dy, x: (-dy,),
    "log": lambda dy, x: (dy / x,),
    "abs": lambda dy, x: (dy * apply("sign", x),),
    "sin": lambda dy, x: (dy * apply("cos", x),),
    "cos": lambda dy, x: (-(dy * apply("sin", x)),),
    "softplus": lambda dy, x: (dy * apply("sigmoid", x),),
    "silu": lambda dy, x: (dy * apply("silu_slope", x),),
    "gelu": lambda dy, x: (dy * apply("gelu_slope", x),),
    "gelu_exact": lambda dy, x: (dy * apply("gelu_exact_slope", x),),
    "exp": lambda dy, y: (dy * y,),
    "expm1": lambda dy, y: (dy * (y + 1.0),),
    "sqrt": lambda dy, y: (dy * 0.5 / y,),
    "relu": lambda dy, y: (dy * apply("gt", y, 0.0),),
    "tanh": lambda dy, y: (dy * (1.0 - y * y),),
    "sigmoid": lambda dy, y: (dy * y * (1.0 - y),),
}
_OF_OUTPUT = {"exp", "expm1", "sqrt", "relu", "tanh", "sigmoid"}
_WITHOUT_GRADIENT = ("lt", "le", "gt", "ge", "eq", "ne", "sign")


def _log_of_base(a: Operand) -> Operand:
    if not isinstance(a, Lazy):
        return float(np.log(a)) if a > 0 else 0.0
    return apply("where", apply("gt", a, 0.0), apply("log", a), 0.0)


def _slope_of_base(dy: Lazy, a: Operand, b: Operand) -> Lazy:
    """Return dy * b * a ** (b - 1), and 0 where b is 0, where a ** b is constant."""
    if isinstance(b, float):
        return dy * b * apply("pow", a, b - 1.0) if b else apply("where", 0.0, dy, 0.0)
    return apply("where", b, dy * b * apply("pow", a, b - 1.0), 0.0)


def _share(compare: str, a: Operand, b: Operand) -> Lazy:
    """Return the share of the gradient that a gets: 1 where the comparison holds, half where a and b are equal."""
    return apply(compare, a, b) + apply("eq", a, b) * 0.5


def elementwise(name: str, *operands: Any) -> Tensor:
    """Apply a function of device/expression.py to Tensors, NumPy arrays and numbers, at least one a Tensor."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    device = device_of(name, tensors)
    given = [operand_of(name, x, tensors[0]) for x in operands]
    y = apply(name, *given)
    result = Tensor(y, device)
    if name not in _WITHOUT_GRADIENT and is_recording() and any(x.requires_grad for x in tensors):
        edges = [edge_of(x) if isinstance(x, Tensor) else None for x in operands]
        record(name, [result], edges, _backward(name, y, given, edges), _read(name, y, given, edges))
    return result


def record(
    name: str, results: Sequence[Tensor], edges: Sequence[Any], backward: Callable[..., Any], saved: Any = ()
) -> None:
    """Put a node with lazy gradients on the tape, and make the Tensors its outputs."""
    node = Node(name, results[0].device, backward, edges, [x.lazy() for x in results], takes_lazy=True, saved=saved)
    for number, x in enumerate(results):
        x.requires_grad, x.node, x.index = True, node, number


def _backward(name: str, y: Lazy, given: Sequence[Operand], edges: Sequence[Any]) -> Callable[..., Any]:
    shapes = [(x.shape, x.dtype) if isinstance(x, Lazy) else None for x in given]
    kept: Sequence[Operand] = (y,) if name in _OF_OUTPUT else tuple(given) if name not in ("add", "sub", "neg") else ()
    count = len(given)

    def backward(dy: Any) -> list[Any]:
        grads = GRADIENTS[name](lazy_of(dy, y.device), *(kept or [0.0] * count))
        return [
            None if edge is None or grad is None or like is None else summed_to(grad, like[0]).astype(like[1])
            for edge, grad, like in zip(edges, grads, shapes)
        ]

    return backward


def _read(name: str, y: Lazy, given: Sequence[Operand], edges: Sequence[Any]) -> Sequence[Operand]:
    """Return the values that the gradients are computed from."""
    if name in _OF_OUTPUT:
        return (y,)
    if name in ("add", "sub", "neg"):
        return ()
    if name in ("mul", "div"):  # each operand for the gradient of the other, and the divisor for its own too
        needs = edges[1] is not None, edges[0] is not None or (name == "div" and edges[1] is not None)
        return [x for x, needed in zip(given, needs) if needed]
    return given[:1] if name == "where" else given


def device_of(name: str, tensors: Sequence[Tensor]) -> Device:
    if not tensors:
        raise WgradError(f"{name}: no operand is a Tensor; make one with wgrad.tensor")
    device = tensors[0].device
    for x in tensors[1:]:
        if x.device is not device:
            raise WgradError(
                f"{name}: operands must be on one device, got {device.name} and {x.device.name}; "
                "make both with the same device"
            )
    return device


def operand_of(name: str, value: Any, beside: Tensor) -> Operand:
    """Return the operand of an expression for a Tensor, an array of the device or of NumPy, or a number.

    NumPy arrays are uploaded to the device of `beside`, floats in its dtype.
    """
    if isinstance(value, Tensor):
        return value.lazy()
    if isinstance(value, int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray | list | tuple):
        array = np.asarray(value)
        wanted = beside.dtype if array.dtype.kind == "f" and beside.dtype.kind not in "iu" else None
        return view_of(to_device(name, array, beside.device, wanted), beside.device)
    if hasattr(value, "lease"):
        return view_of(value, beside.device)
    raise WgradError(f"{name}: an operand must be a Tensor, an array or a number, got {type(value).__name__}")


def _function(name: str, doc: str) -> Callable[..., Tensor]:
    def function(*operands: Any) -> Tensor:
        return elementwise(name, *operands)

    function.__name__, function.__doc__ = name, doc
    return implements_method(name)(function)


add, sub = _function("add", "a + b."), _function("sub", "a - b.")
mul, div, neg = _function("mul", "a * b."), _function("div", "a / b."), _function("neg", "-x.")
lt, le, gt = _function("lt", "a < b: 1 or 0."), _function("le", "a <= b: 1 or 0."), _function("gt", "a > b: 1 or 0.")
ge, eq, ne = _function("ge", "a >= b: 1 or 0."), _function("eq", "a == b: 1 or 0."), _function("ne", "a != b: 1 or 0.")
exp, log = _function("exp", "e to the power of x."), _function("log", "The natural logarithm of x.")
expm1 = _function("expm1", "exp(x) - 1, with all its digits for small x.")
sqrt, abs = _function("sqrt", "The square root of x."), _function("abs", "The absolute value of x.")
sign = _function("sign", "-1, 0 or 1.")
sin, cos = _function("sin", "The sine of x."), _function("cos", "The cosine of x.")
tanh, sigmoid = _function("tanh", "The hyperbolic tangent of x."), _function("sigmoid", "1 / (1 + exp(-x)).")
relu, silu = _function("relu", "max(x, 0)."), _function("silu", "x * sigmoid(x).")
softplus = _function("softplus", "log(1 + exp(x)).")
gelu = _function("gelu", "GELU of x, in the tanh form.")
gelu_exact = _function("gelu_exact", "GELU of x, with the normal distribution function.")
maximum = _function("maximum", "The larger of a and b; equal ones share the gradient.")
minimum = _function("minimum", "The smaller of a and b; equal ones share the gradient.")
where = _function(
    "where",
    """Elements of a or b.

    Args:
        condition: Numbers, of which 0 is false: where it is true a is taken, else b.
        a: A Tensor, array or number.
        b: A Tensor, array or number. All three are broadcast to each other.

    Returns:
        A Tensor of the shape that all three are broadcast to.

    Raises:
        ShapeError: the shapes cannot be broadcast.
    """,
)


_MOST_FACTORS = 8  # of a power of whole numbers


@implements_method("pow")
def pow(base: Any, exponent: Any) -> Tensor:
    """base ** exponent. Small whole exponents are products, which keep every digit and whole numbers whole."""
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        if isinstance(base, Tensor) and base.dtype.kind in "iu":
            if isinstance(exponent, int) and 0 <= exponent <= _MOST_FACTORS:
                return functools.reduce(mul, [base] * exponent, mul(base, 0) + 1)
            base = to(base, np.float32)
        if exponent == 2:
            return mul(base, base)
        if exponent == 3:
            return mul(mul(base, base), base)
        if exponent == 0.5:
            return sqrt(base)
        if exponent == -1:
            return div(1.0, base)
    return elementwise("pow", base, exponent)


def _truth(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype.kind == "f":
        raise WgradError(f"& | and ~ are for comparisons, got a Tensor of {x.dtype}; compare it first: x != 0")
    return ne(x, 0) if isinstance(x, Tensor) else np.asarray(x) != 0


@implements_method("both")
def both(a: Any, b: Any) -> Tensor:
    """Return 1 where a and b are not 0."""
    return elementwise("ne", elementwise("minimum", _truth(a), _truth(b)), 0)


@implements_method("either")
def either(a: Any, b: Any) -> Tensor:
    """Return 1 where a or b is not 0."""
    return elementwise("ne", elementwise("maximum", _truth(a), _truth(b)), 0)


@implements_method("in_place")
def in_place(name: str, x: Tensor, result: Tensor) -> Tensor:
    """Return the value of x after `x += ...`: result, or the parameter x, overwritten with it."""
    if not x.requires_grad or x.node is not None:
        return result
    if is_recording():
        raise WgradError(f"a parameter cannot be changed by {name} while gradients are recorded; use wgrad.no_grad()")
    return x.copy_(result)


@implements_method("copy_")
def copy_(x: Tensor, values: Any) -> Tensor:
    """Overwrite the values of a parameter or constant in place, and return it."""
    if x.node is not None:
        raise WgradError("copy_: the Tensor is a result on the tape; only parameters and constants can be changed")
    given = operand_of("copy_", values, x)
    if not isinstance(given, Lazy):
        array = x.device.empty(x.shape, x.dtype)
        x.device.fill(array, given)
    elif broadcast("copy_", x.shape, given.shape) != x.shape:
        raise ShapeError(f"copy_: values must broadcast to {list(x.shape)}, got {list(given.shape)}; reshape them")
    else:
        given = given.expanded(x.shape).astype(x.dtype)
        array = given.array()
        if memory_of(array) is memory_of(x.data):
            array = Lazy("add", (given, 0.0), x.shape, x.dtype, x.device).array()
    before_writing([x.data])
    x.device.copy(array, x.data)
    return x


def _on_device(x: Tensor, name: Any) -> Tensor:
    """Copy x to a device, given as such or by name; the gradient is copied back."""
    from wgrad.autograd.creation import device_named

    here, there = x.device, device_named(name)
    if there is here:
        return x
    result = Tensor(there.upload(x.numpy()), there)
    if is_recording() and x.requires_grad:
        node = Node("to", there, lambda dy: [here.upload(there.download(dy))], [edge_of(x)], [result.data])
        result.requires_grad, result.node = True, node
    return result


@implements_method("clone")
def clone(x: Tensor) -> Tensor:
    """Copy x into memory of its own, at once, since x may be overwritten later."""
    made = _stored(x, x.dtype)
    made.lazy().array()
    return made


@implements_method("to")
def to(x: Tensor, dtype: Any) -> Tensor:
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        return _on_device(x, dtype)
    if wanted == np.bool_:
        return ne(x, 0)
    if wanted == np.int64:
        wanted = np.dtype(np.int32)  # as long()
    return x if wanted == x.dtype else _stored(x, wanted)


def _stored(x: Tensor, dtype: np.dtype) -> Tensor:
    """Return x's values in a new array of this dtype."""
    made = Lazy("add", (x.lazy(), 0.0), x.shape, dtype, x.device)
    if dtype.kind in "iu":  # so that later functions see the truncated values
        made.array()
        return Tensor(made, x.device)
    result = Tensor(made, x.device)
    if is_recording() and x.requires_grad:
        before, device = x.dtype, x.device

        def backward(dy: Any) -> list[Any]:
            return [lazy_of(dy, device).astype(before)]

        record("to", [result], [edge_of(x)], backward)
    return result
