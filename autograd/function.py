"""Differentiable functions on Tensors: forward, backward, and the operator on devices, next to each other.

    @differentiable
    def rms_norm(ctx, x: Tensor, weight: Weight, eps: float, *, dtype: DType = None) -> Tensor:
        '''Callers see this signature without ctx, and this docstring.'''
        ctx.save(...)
        return y

    @rms_norm.backward
    def _(ctx, dy):
        return dx, dweight

    @rms_norm.operator
    def _(args, x, weight, eps, *, dtype=None): ...the rules of `device.rms_norm`, see operators.py...

    @rms_norm.reference
    def _(x, weight, eps, dtype): ...NumPy...

The forward is annotated for its callers: inside, every Tensor is its device array. The backward returns a gradient (or
None) for each argument, in order, up to the last one that may have one; a single gradient needs no tuple. Its own
arguments are None for outputs that were not used, and must not be written to, because others may hold the same array.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.gradients import Recomputed
from wgrad.autograd.operators import Operator, operator
from wgrad.autograd.tensor import Edge, Node, Tensor, edge_of, is_recomputing, is_recording
from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError
from wgrad.device.shown import short

P = ParamSpec("P")
T = TypeVar("T", covariant=True)
Weight = Tensor | Array


class Context:
    """Values that a forward saves for its backward. A forward may set further attributes.

    Attributes:
        name: Name of the function, for errors.
        device: Device of the call.
        needs_grad: Whether each argument needs a gradient.
        saved: Arguments of `save`.
        rounds_to: Set by a forward whose backward rounds the gradient of its output to this dtype. That backward may
            get a GradientWithCopy.
        recomputed: Set by a forward whose backward can recompute its first output.
    """

    def __init__(self, name: str, device: Device, edges: Sequence[Edge]) -> None:
        self.name, self.device = name, device
        self.needs_grad = tuple(edge is not None for edge in edges)
        self.saved: tuple[Any, ...] = ()
        self.rounds_to: np.dtype | None = None
        self.recomputed: Recomputed | None = None
        self._edges = edges

    def save(self, *arrays: Any) -> None:
        """Keep arrays (or None) until the backward has run."""
        self.saved = arrays

    def grad_buffer(self, i: int) -> Array | None:
        """Return the float32 gradient buffer of argument i, if it is a leaf with one, else None.

        A backward that can add to the buffer in place does so, and returns None for that argument.
        """
        edge = self._edges[i]
        return edge.gradient if isinstance(edge, Tensor) and edge.has_grad_buffer else None

    def rounded_by(self, i: int) -> np.dtype | None:
        """Return the dtype to which the gradient of argument i will be rounded, if any.

        A backward that has the rounded values may return GradientWithCopy, which saves a launch.
        """
        edge = self._edges[i]
        return edge[0].rounds_to if isinstance(edge, tuple) else None

    def recomputed_by(self, i: int) -> Recomputed | None:
        """Return the `Recomputed` of argument i, if the backward of its producer recomputes it, else None.

        A forward that needs the argument only for gradients of leaves then need not save it.
        """
        edge = self._edges[i]
        return edge[0].recomputed if isinstance(edge, tuple) and edge[1] == 0 else None

    if TYPE_CHECKING:  # a forward may set any attribute

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class Function(Generic[P, T]):
    """A differentiable function of Tensors, and of arrays or None, which get no gradient.

    It returns a Tensor or a tuple of Tensors. A tuple as an argument (LoraTerm) stands for its parts.

    forward: function of the context and the arguments. described: function with the name, docstring and signature to
    show; its first parameter is left out.
    """

    def __init__(self, forward: Callable[..., Any], described: Callable[..., Any]) -> None:
        self.__name__, self.__doc__, self.__module__ = described.__name__, described.__doc__, described.__module__
        given = inspect.signature(described)
        self.__signature__ = given.replace(parameters=list(given.parameters.values())[1:])
        self._parameters = tuple(self.__signature__.parameters)
        self._forward = forward
        self._backward: Callable[..., Any]
        self.rules: Operator

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the function that turns gradients of the outputs into those of the arguments."""
        self._backward = function
        return function

    def operator(self, rules: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the rules of the operator of this name on devices."""
        self.rules = operator(rules, self.__name__)
        return rules

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the operator's implementation in NumPy."""
        return self.rules.reference(function)

    def renamed(self, name: str, doc: str) -> Function[P, T]:
        """Return a copy with another name, which forward and backward see as `ctx.name`."""
        other = copy.copy(self)
        other.__name__, other.__doc__ = name, doc
        return other

    def __call__(self, *args: P.args, **options: P.kwargs) -> T:
        """Run the forward, and record it on the tape. Without Tensors, an argument `device` must name the device."""
        given: dict[str, Any] = {**dict(zip(self._parameters, args)), **options}
        _refuse_shapes(self.__name__, given)
        inputs = [part for name in self._parameters for part in _parts(given.get(name))]
        device = _device_of(self.__name__, inputs, given.get("device"))
        edges = [edge_of(x) if isinstance(x, Tensor) and is_recording() else None for x in inputs]
        ctx = Context(self.__name__, device, edges)
        result = self._forward(ctx, *map(_data, args), **{name: _data(value) for name, value in options.items()})
        outputs = result if isinstance(result, tuple) else (result,)
        tensors: Any = tuple(Tensor(out, device) for out in outputs)
        if any(ctx.needs_grad):
            attach(ctx, lambda *grads: self._gradients(ctx, grads), edges, tensors)
        found: T = tensors if isinstance(result, tuple) else tensors[0]
        return found

    def _gradients(self, ctx: Context, grads: Sequence[Array | None]) -> list[Array | None]:
        """Return a gradient for each argument; None for those after the backward's last one."""
        given, count = self._backward(ctx, *grads), len(ctx.needs_grad)
        found = [*given] if type(given) in (tuple, list) else [given]  # GradientWithCopy, a tuple, is one gradient
        if any(ctx.needs_grad[len(found) :]):
            raise WgradError(f"{self.__name__}: an argument without gradient is a Tensor that requires one; detach it")
        return (found + [None] * count)[:count]


def differentiable(forward: Callable[Concatenate[Context, P], T]) -> Function[P, T]:
    """Decorate a forward to make it a function on Tensors."""
    return Function(forward, forward)


def with_backward(name: str, again: str = "") -> Callable[[Callable[Concatenate[Args, P], None]], Function[P, Tensor]]:
    """Decorate an operator's rules to make them a function on Tensors whose backward is another operator.

    The rules are annotated for callers, like a forward.

    Args:
        name: Operator that computes the gradients from dy and the same arguments.
        again: Argument of that operator for an array to overwrite with the output, if it can recompute it.
    """

    def make(rules: Callable[Concatenate[Args, P], None]) -> Function[P, Tensor]:
        def forward(ctx: Context, *args: Any, **options: Any) -> Array:
            ctx.arguments = {**dict(zip(made.rules.parameters, args)), **options}
            y = getattr(ctx.device, made.__name__)(**ctx.arguments)
            if again and not is_recomputing():
                ctx.recomputed, ctx.like = Recomputed(), (tuple(y.shape), y.dtype)
            return y

        def backward(ctx: Context, dy: Array) -> Any:
            y = ctx.device.empty(*ctx.like) if ctx.recomputed else None
            found = getattr(ctx.device, name)(dy, **ctx.arguments, **({} if y is None else {again: y}))
            if ctx.recomputed:
                ctx.recomputed.give(y)
            return found

        made: Function[P, Tensor] = Function(forward, rules)
        made.operator(rules)
        made.backward(backward)
        return made

    return make


def _refuse_shapes(name: str, given: dict[str, Any]) -> None:
    for argument, value in given.items():
        if type(value) in (tuple, list) and value and all(isinstance(n, int) for n in value):
            raise WgradError(
                f"{name}: {argument} must be a Tensor, got the shape {short(value)}; unlike in PyTorch no shape is "
                "given, as the last axis is meant, and a norm without weights takes wgrad.ones and wgrad.zeros"
            )


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _data(value: Any) -> Any:
    """Return an argument with Tensors replaced by their device arrays."""
    if isinstance(value, tuple):
        return type(value)(*map(_data, value))
    return value.data if isinstance(value, Tensor) else value


def attach(ctx: Context, backward: Any, edges: Sequence[Edge], outputs: Sequence[Tensor]) -> None:
    """Record a node on the tape, with the given Tensors as its outputs."""
    made = [out.data for out in outputs]
    node = Node(ctx.name, ctx.device, backward, edges, made, ctx.rounds_to, ctx.recomputed, saved=vars(ctx))
    for index, out in enumerate(outputs):
        out.requires_grad, out.node, out.index = True, node, index


def _device_of(name: str, inputs: Sequence[Any], device: Device | None) -> Device:
    for x in inputs:
        if isinstance(x, Tensor):
            if device is not None and x.device is not device:
                raise WgradError(
                    f"{name}: arguments must be on one device, got {device.name} and {x.device.name}; "
                    "download and upload one of them"
                )
            device = x.device
    if device is None:
        raise WgradError(
            f"{name}: no argument is a Tensor, so the device is not known; wrap one: Tensor(array, device)"
        )
    return device
