"""Tensor and the backward pass: a node for each operator, and gradients summed in reverse topological order.

The backward pass frees memory as it goes: once a node's backward has run, its saved arrays and its gradient return to
the device's pool. So a graph can be walked only once.

Values of Tensors, and gradients, may be lazy (lazy.py). The methods that PyTorch's users know (`+`, `sum`, slices, ...)
call functions of autograd/ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from wgrad.autograd.gradients import GradientWithCopy, Recomputed, whole_of
from wgrad.autograd.lazy import Lazy, lazy_of
from wgrad.autograd.modes import is_recomputing as is_recomputing
from wgrad.autograd.modes import is_recording as is_recording
from wgrad.autograd.modes import no_grad as no_grad
from wgrad.autograd.modes import recomputing as recomputing
from wgrad.autograd.modes import recording as recording
from wgrad.autograd.modes import refuse_reading
from wgrad.autograd.shapes import filled_in
from wgrad.autograd.torch_methods import TorchMethods
from wgrad.autograd.written import before_writing as before_writing
from wgrad.autograd.written import waiting, writes, written_since
from wgrad.device.contract import Array, Device
from wgrad.device.errors import ShapeError, WgradError

# Where a gradient goes: output number `index` of a node, a leaf, or nowhere.
Edge: TypeAlias = "tuple[Node, int] | Tensor | None"


class Node:
    """An operator on the tape.

    edges[i]: where the gradient of input i goes. rounds_to: dtype to which its backward rounds the gradient of its
    output; it then accepts a GradientWithCopy. recomputed: of its only output. takes_lazy: whether its backward accepts
    Lazies. saved: arrays and Lazies that its backward reads, or the attributes of its Context.
    """

    __slots__ = (
        *("name", "device", "backward", "edges", "outputs", "rounds_to", "recomputed", "takes_lazy"),
        *("saved", "made_at"),
    )

    def __init__(
        self,
        name: str,
        device: Device,
        backward: Callable[..., Sequence[Array | None]],
        edges: Sequence[Edge],
        outputs: Sequence[Array | Lazy],
        rounds_to: np.dtype | None = None,
        recomputed: Recomputed | None = None,
        takes_lazy: bool = False,
        saved: Any = (),
    ) -> None:
        self.name, self.takes_lazy = name, takes_lazy
        self.saved, self.made_at = saved, writes()
        self.device = device
        self.rounds_to, self.recomputed = rounds_to, recomputed
        self.backward: Callable[..., Sequence[Array | None]] | None = backward
        self.edges: Sequence[Edge] = edges
        self.outputs = [(tuple(out.shape), np.dtype(out.dtype)) for out in outputs]

    def release(self) -> None:
        """Drop saved arrays, and the references to earlier nodes."""
        self.backward = None
        self.edges = self.saved = ()

    def check_saved(self) -> None:
        """Raise WgradError if arrays that the backward reads were overwritten since the forward."""
        if written_since(self.made_at, self.saved):
            raise WgradError(
                f"backward: values that {self.name} needs were changed in place after the forward, by an optimizer's "
                "step, copy_ or an assignment such as -=; call backward before, or compute with x.clone()"
            )


class Tensor(TorchMethods):
    """An array on a device, with automatic differentiation.

    data: the device's array, computed at first use. gradient: an array of the same shape after `backward`, for leaves
    that require it.
    """

    __slots__ = (
        *("_data", "device", "requires_grad", "gradient", "has_grad_buffer", "received", "node", "index"),
        "__weakref__",
    )

    def __init__(self, data: Array | Lazy, device: Device, requires_grad: bool = False) -> None:
        self._data = data
        self.device = device
        if isinstance(data, Lazy):
            waiting[id(self)] = self
        if requires_grad:
            _check_float(self.dtype)
        self.requires_grad = requires_grad
        self.gradient: Array | None = None
        self.has_grad_buffer = False  # whether gradients are added to `gradient` in place
        self.received = False  # whether a backward pass reached this leaf since its optimizer's zero_grad
        self.node: Node | None = None
        self.index = 0  # number of this output of the node

    @property
    def data(self) -> Array:
        held = self._data
        if isinstance(held, Lazy):
            held = self._data = held.array()
            waiting.pop(id(self), None)
        return held

    @data.setter
    def data(self, value: Array | Tensor) -> None:
        if self.has_grad_buffer:
            raise WgradError("data: an optimizer holds this parameter; use copy_ in no_grad, which keeps its memory")
        self._data = value.data if isinstance(value, Tensor) else value

    @property
    def grad(self) -> Tensor | None:
        """Gradient after `backward`, for a leaf that requires it."""
        return None if self.gradient is None else Tensor(self.gradient, self.device)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and (not isinstance(value, Tensor) or value.shape != self.shape):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise WgradError(f"grad: must be None or a Tensor of shape {list(self.shape)}, got {found}")
        self.received = value is not None
        if self.has_grad_buffer:  # an optimizer keeps it
            if value is None:
                self.device.fill(self.gradient, 0.0)
            else:
                self.device.copy(value.data, self.gradient)
        else:
            self.gradient = None if value is None else value.data

    def lazy(self) -> Lazy:
        """Return the values for lazy expressions."""
        return lazy_of(self._data, self.device)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    @property
    def dtype(self) -> np.dtype:
        result: np.dtype = np.dtype(self._data.dtype)
        return result

    def __repr__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"Tensor({list(self.shape)} {self.dtype.name} on {self.device.name}{grad})"

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set requires_grad of a leaf, and return the Tensor."""
        if self.node is not None:
            raise WgradError("requires_grad_: the Tensor is a result on the tape; use detach() first")
        if requires_grad:
            _check_float(self.dtype)
        self.requires_grad = requires_grad
        return self

    def numpy(self) -> np.ndarray:
        """Wait for the device, and copy the values to the host."""
        refuse_reading()
        return self.device.download(self.data)

    def detach(self) -> Tensor:
        """Return a Tensor of the same array that is not on the tape."""
        return Tensor(self._data, self.device)

    def reshape(self, *sizes: int | Sequence[int]) -> Tensor:
        """Return the same storage in another shape; one axis may be -1."""
        shape: Any = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        device, before = self.device, self.shape
        result = Tensor(device.view(self.data, filled_in(self.shape, shape)), device)
        if is_recording() and self.requires_grad:
            node = Node("reshape", device, lambda dy: (device.view(dy, before),), [edge_of(self)], [result.data])
            result.requires_grad, result.node = True, node
        return result

    def watched(self, passed: Callable[[], None]) -> Tensor:
        """Return the same values; `passed` is called in the backward pass after the backwards of all their users."""
        result = Tensor(self.data, self.device)
        if is_recording() and self.requires_grad:

            def backward(dy: Array) -> Sequence[Array]:
                passed()
                return (dy,)

            result.requires_grad = True
            result.node = Node("watched", self.device, backward, [edge_of(self)], [result.data])
        return result

    def backward(self, gradient: Array | Tensor | None = None, retain_graph: bool = False) -> None:
        """Add d self / d leaf to the grad of every leaf that requires it.

        Args:
            gradient: Gradient of this Tensor, of the same shape; for a loss, float32 [1], where a loss scale goes in.
                None: 1, for a Tensor of one element. Whole numbers become floats.
            retain_graph: Must be False; it exists to tell PyTorch's users what to write instead.

        Raises:
            ShapeError: The gradient has another shape than the Tensor, or is missing for several elements.
            WgradError: The Tensor is not on the tape, its tape was walked before, or `retain_graph` is true.
        """
        if retain_graph:
            raise WgradError(
                "backward: a graph is walked once, so retain_graph must be False; add the losses and call backward once"
            )
        if not self.requires_grad:
            raise WgradError(
                "backward: nothing below this tensor requires a gradient; make a leaf with requires_grad=True "
                "and compute outside no_grad"
            )
        if isinstance(gradient, list | tuple | int | float):
            raise WgradError(f"backward: gradient must be a Tensor, got {type(gradient).__name__}; use wgrad.tensor")
        if isinstance(gradient, Tensor) and gradient.dtype.kind in "iu":
            gradient = gradient.to(self.dtype)
        seed = gradient.data if isinstance(gradient, Tensor) else gradient
        if seed is None:
            if math.prod(self.shape) != 1:
                raise ShapeError(
                    "backward: gradient is needed for a tensor of more than one element, got shape "
                    f"{list(self.shape)}; pass one of that shape or reduce with sum first"
                )
            seed = self.device.empty(self.shape, self.dtype)
            self.device.fill(seed, 1.0)
        elif tuple(seed.shape) != self.shape:
            raise ShapeError(
                f"backward: gradient must have the tensor's shape {list(self.shape)}, got {list(seed.shape)}; "
                "reshape it"
            )
        run_backward([self], [seed])


def _check_float(dtype: np.dtype) -> None:
    if dtype.kind in "iu":
        raise WgradError(f"requires_grad: a Tensor must be of floats to have a gradient, got {dtype}; use float()")


def parameter(data: Array, device: Device, grad: Array | None = None) -> Tensor:
    """Create a trainable leaf.

    grad: float32 array of the same shape (a view of a flat buffer), to which gradients are added in place; the caller
    clears it. None: `backward` makes one.
    """
    if grad is not None and tuple(grad.shape) != tuple(data.shape):
        raise ShapeError(
            f"parameter: grad must have the shape of data {list(data.shape)}, got {list(grad.shape)}; "
            "take a view of the flat gradient buffer of that shape"
        )
    leaf = Tensor(data, device, requires_grad=True)
    leaf.gradient, leaf.has_grad_buffer = grad, grad is not None
    return leaf


def edge_of(tensor: Tensor) -> Edge:
    """Return where the gradient of a tensor goes."""
    if not tensor.requires_grad:
        return None
    return (tensor.node, tensor.index) if tensor.node is not None else tensor


class _Gradients:
    """Gradients that were sent to nodes: for each output an array, and whether it may be added to in place.

    A gradient may be shared (a residual passes its own on), so the first sum makes a new array. Its rounded copy is
    dropped when something is added.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, list[tuple[Array | GradientWithCopy, bool] | None]] = {}
        self._sums: dict[int, tuple[Tensor, Lazy]] = {}  # lazy gradients of leaves, by their ids

    def send(self, edge: Edge, given: Array | GradientWithCopy | None) -> None:
        grad = whole_of(given)
        if edge is None or grad is None:
            return
        if isinstance(edge, Tensor):
            self._to_leaf(edge, grad)
            return
        node, index = edge
        device, (shape, dtype) = node.device, node.outputs[index]
        if tuple(grad.shape) != shape:
            raise AssertionError(f"a gradient of shape {list(grad.shape)} reached {node.name}, whose output is {shape}")
        if np.dtype(grad.dtype) != dtype:
            given = grad = grad.astype(dtype) if isinstance(grad, Lazy) else device.cast(grad, dtype)
        waiting = self._waiting.setdefault(node, [None] * len(node.outputs))
        held = waiting[index]
        if held is None:
            waiting[index] = (grad if node.rounds_to is None else given, False)
        else:
            total, ours = whole_of(held[0]), held[1]
            if isinstance(total, Lazy) or isinstance(grad, Lazy):
                waiting[index] = (lazy_of(total, device) + lazy_of(grad, device), False)
            else:
                waiting[index] = (device.add(total, grad, out=total) if ours else device.add(total, grad), True)

    def _to_leaf(self, leaf: Tensor, grad: Array) -> None:
        if tuple(grad.shape) != leaf.shape:
            raise AssertionError(f"a gradient of shape {list(grad.shape)} reached a leaf of shape {list(leaf.shape)}")
        if isinstance(grad, Lazy) and grad.op != "reduce":
            _, before = self._sums.get(id(leaf), (leaf, None))
            self._sums[id(leaf)] = leaf, grad if before is None else before + grad
        else:
            self._add(leaf, grad)

    def finish(self) -> None:
        """Compute the lazy gradients of leaves."""
        for leaf, total in self._sums.values():
            self._add(leaf, total)

    def _add(self, leaf: Tensor, grad: Array | Lazy) -> None:
        if isinstance(grad, Lazy):
            if leaf.has_grad_buffer:
                grad.write(leaf.gradient, accumulate=True)
                return
            grad = grad.array()
        if leaf.gradient is None:
            leaf.gradient = grad
        elif leaf.has_grad_buffer:
            leaf.device.add(leaf.gradient, grad, out=leaf.gradient)
        else:
            leaf.gradient = leaf.device.add(leaf.gradient, grad)

    def take(self, node: Node) -> list[Array | GradientWithCopy | None] | None:
        waiting = self._waiting.pop(node, None)
        return None if waiting is None else [None if held is None else held[0] for held in waiting]


def run_backward(roots: Sequence[Tensor], seeds: Sequence[Array | None]) -> None:
    """Run the backward pass from roots with the given gradients (None: no gradient)."""
    order = _topological([root.node for root in roots if root.requires_grad and root.node is not None])
    for root in roots:
        root.received = root.received or root.node is None
    gradients = _Gradients()
    for root, seed in zip(roots, seeds):
        gradients.send(edge_of(root), seed)
    with recording(False):
        while order:
            node = order.pop()
            incoming = gradients.take(node)
            if incoming is not None:
                node.check_saved()
            backward, edges = node.backward, node.edges
            node.release()
            if incoming is None or backward is None:
                continue
            if not node.takes_lazy:
                incoming = [grad.array() if isinstance(grad, Lazy) else grad for grad in incoming]
            results = backward(*incoming)
            del backward, incoming  # free saved arrays and the output's gradient before making new ones
            for edge, grad in zip(edges, results, strict=True):
                gradients.send(edge, grad)
            del edges, results
        gradients.finish()


def _topological(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes below the roots, each after those it depends on, and mark their leaves as `received`.

    Without recursion, because graphs are deep.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if node.backward is None:
            raise WgradError(
                f"backward: the tape was walked before through {node.name}, and what it saved is gone; run the "
                "forward again, or add the losses and call backward once"
            )
        stack.append((node, True))
        for edge in node.edges:
            if isinstance(edge, tuple):
                stack.append((edge[0], False))
            elif edge is not None:
                edge.received = True
    return order
