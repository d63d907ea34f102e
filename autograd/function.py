"""Function: the forward and the backward of one operator, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wgrad.autograd.tensor import Edge, Node, Tensor, edge_of, is_recording
from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError


class Context:
    """What a forward leaves for its backward.

    name: the function's, for errors. device: where to compute. needs_grad[i]: whether input i wants a gradient.
    saved: what `save` was given.
    A Function may set further attributes for plain values.
    """

    def __init__(self, name: str, device: Device, edges: Sequence[Edge]) -> None:
        self.name, self.device = name, device
        self.needs_grad = tuple(edge is not None for edge in edges)
        self.saved: tuple[Any, ...] = ()
        self._edges = edges

    def save(self, *arrays: Any) -> None:
        """Keep arrays (or None) until the backward has run."""
        self.saved = arrays

    def grad_buffer(self, i: int) -> Array | None:
        """The float32 buffer of input i, when it is a leaf that has one: an operator that can add its gradient to
        it in place does so and returns None for that input."""
        edge = self._edges[i]
        return edge.grad if isinstance(edge, Tensor) and edge.has_grad_buffer else None

    if TYPE_CHECKING:  # a forward sets what attributes it likes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class Function:
    """Subclasses define `forward(ctx, *inputs, **options)` on device arrays, returning an array or a tuple of them, and
    `backward(ctx, *grads)`, returning one gradient (or None) for each input. A grad is None where that output was not
    used. A backward never writes to a gradient that it was given: others may hold the same array."""

    @staticmethod
    def forward(ctx: Context, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Sequence[Array | None]:
        raise NotImplementedError

    @classmethod
    def apply(cls, *inputs: Any, device: Device | None = None, **options: Any) -> Any:
        """Run the forward on Tensors (and raw arrays or None, which get no gradient) and put the node on the tape.

        device: needed only when no input is a Tensor. Returns a Tensor, or a tuple of them.
        """
        device = _device_of(cls.__name__.lower(), inputs, device)
        edges = [edge_of(x) if isinstance(x, Tensor) and is_recording() else None for x in inputs]
        ctx = Context(cls.__name__.lower(), device, edges)
        arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
        result = cls.forward(ctx, *arrays, **options)
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = tuple(Tensor(out, device) for out in outputs)
        if any(ctx.needs_grad):
            attach(ctx, lambda *grads: cls.backward(ctx, *grads), edges, tensors)
        return tensors if isinstance(result, tuple) else tensors[0]


def attach(ctx: Context, backward: Any, edges: Sequence[Edge], outputs: Sequence[Tensor]) -> None:
    """Put a node on the tape and make the tensors its outputs."""
    node = Node(ctx.name, ctx.device, backward, edges, [out.data for out in outputs])
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
