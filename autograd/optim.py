"""Optimizers for Tensors: SGD and AdamW, with a few launches for all parameters together.

An optimizer moves its parameters into one buffer on the device, and their gradients into another, to which `backward`
adds. The learning rate is on the device too, so that a recorded step follows its changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from wgrad.autograd.modes import refuse_in_step
from wgrad.autograd.ops.optimizer import HYPER_LR, HYPER_MAX_NORM, HYPER_SIZE, STATE_SIZE
from wgrad.autograd.tensor import Tensor, before_writing
from wgrad.device.contract import Array
from wgrad.device.errors import WgradError
from wgrad.device.expression import Program

_ALIGN = 64  # elements; a view must start at a multiple of it


class Optimizer:
    """Base class of optimizers, with one buffer each for parameters and gradients.

    Attributes:
        lr: Learning rate, which may be set at any time.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, max_norm: float = 0.0) -> None:
        self.parameters = list(parameters)
        _check(self.parameters)
        self.device = device = self.parameters[0].device
        self._offsets, size = [0], 0
        for p in self.parameters:
            size += -(-p.size // _ALIGN) * _ALIGN
            self._offsets.append(size)
        self._data, self._grad = device.zeros((size,)), device.zeros((size,))
        before_writing()
        for p, at in zip(self.parameters, self._offsets):
            data, grad = (device.view(whole, p.shape, at) for whole in (self._data, self._grad))
            device.copy(p.data, data)
            p.received = p.gradient is not None
            if p.gradient is not None:
                device.copy(p.gradient, grad)
            p.data, p.gradient, p.has_grad_buffer = data, grad, True
        self._hyper_host = np.zeros(HYPER_SIZE, np.float32)
        self._hyper_host[[HYPER_LR, HYPER_MAX_NORM]] = lr, max_norm
        self._hyper = device.upload(self._hyper_host)

    @property
    def lr(self) -> float:
        return float(self._hyper_host[HYPER_LR])

    @lr.setter
    def lr(self, value: float) -> None:
        refuse_in_step("sets lr")
        self._hyper_host[HYPER_LR] = value
        self.device.write(self._hyper, self._hyper_host)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to 0. Their memory stays.

        Args:
            set_to_none: Whether `step` then leaves out parameters that no backward pass reaches.
        """
        before_writing([self._grad])
        self.device.fill(self._grad, 0.0)
        if set_to_none:
            for p in self.parameters:
                p.received = False

    def step(self) -> None:
        """Update the parameters that received a gradient since `zero_grad`."""
        received = [number for number, p in enumerate(self.parameters) if p.received]
        if received:
            before_writing([self._data, self._grad])
            self._step(received)

    def _step(self, received: list[int]) -> None:
        raise NotImplementedError

    def _parts(self, numbers: list[int], *buffers: Array) -> list[tuple[Array, ...]]:
        """Return the parts of flat buffers that hold parameters, neighbors in one part. numbers: sorted."""
        if len(numbers) == len(self.parameters):
            return [buffers]
        runs: list[list[int]] = []
        for number in numbers:
            if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            else:
                runs.append([number, number + 1])
        bounds = [(self._offsets[first], self._offsets[last]) for first, last in runs]
        return [tuple(self.device.view(b, (end - at,), at) for b in buffers) for at, end in bounds]

    def _flat(self, program: Any, arrays: tuple[Array, ...], scalars: tuple[float, ...], out: Array) -> None:
        """Compute an expression of flat buffers, and of the learning rate, which is the same for all elements."""
        shape = tuple(out.shape)
        views = tuple(((0 if a is self._hyper else 1,), HYPER_LR if a is self._hyper else 0) for a in arrays)
        self.device.fused(program, arrays, views, scalars, shape, out=out)


class SGD(Optimizer):
    """Stochastic gradient descent, like torch.optim.SGD.

    Args:
        parameters: Leaf Tensors of float32 that require a gradient.
        lr: Learning rate.
        momentum: Factor of the buffer of earlier gradients; 0: no momentum.
        weight_decay: Factor of the parameter that is added to its gradient.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float = 1e-3, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr)
        self._momentum, self._decay = momentum, weight_decay
        self._moved = self.device.zeros(self._data.shape) if momentum else None

    def _step(self, received: list[int]) -> None:
        moved = () if self._moved is None else (self._moved,)
        for part in self._parts(received, self._data, self._grad, *moved):
            self._update(*part)

    def _update(self, data: Array, change: Array, moved: Array | None = None) -> None:
        decay: Program = (("old",), ("load", 0), ("scalar", 0), ("mul", 0, 2), ("add", 1, 3))  # g + decay * p
        if moved is not None:
            program = (
                *(("old",), ("load", 0), ("load", 1), ("scalar", 0), ("scalar", 1)),
                *(("mul", 0, 3), ("mul", 2, 4), ("add", 5, 1), ("add", 7, 6)),
            )
            self._flat(program, (change, data), (self._momentum, self._decay), moved)
            change = moved
            decay = (("old",), ("load", 0))
        rate = len(decay)
        step = (*decay, ("load", 1), ("mul", rate - 1, rate), ("sub", 0, rate + 1))
        scalars = () if moved is not None else (self._decay,)
        self._flat(step, (change, self._hyper), scalars, data)


class AdamW(Optimizer):
    """AdamW, like torch.optim.AdamW.

    Args:
        parameters: Leaf Tensors of float32 that require a gradient.
        lr: Learning rate.
        betas: Factors of the running means of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        max_norm: Norm to which gradients are clipped; steps with a gradient that is not finite are then skipped. 0:
            neither.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr, max_norm)
        self._betas, self._eps, self._decay, self._max_norm = betas, eps, weight_decay, max_norm
        device = self.device
        self._mean, self._square = device.zeros(self._data.shape), device.zeros(self._data.shape)
        self._loss_scale, self._no_norm = device.upload(np.ones(1, np.float32)), device.zeros((2,))
        # Parameters that received gradients in the same steps, and the state that counts these for the bias correction.
        self._groups = [(list(range(len(self.parameters))), device.zeros((STATE_SIZE,)))]

    def _step(self, received: list[int]) -> None:
        device, (beta1, beta2) = self.device, self._betas
        norm = device.grad_norm(self._grad) if self._max_norm else self._no_norm
        if len(received) < len(self.parameters):
            self._split_groups({*received})
        updated = {*received}
        for members, state in self._groups:
            if members[0] not in updated:
                continue
            device.clip(norm, self._hyper, state, self._loss_scale, beta1=beta1, beta2=beta2)
            for data, *others in self._parts(members, self._data, self._grad, self._mean, self._square):
                decay = {"weight_decay": self._decay, "decay_elements": math.prod(data.shape)}
                device.adamw(data, *others, self._hyper, state, beta1=beta1, beta2=beta2, eps=self._eps, **decay)

    def _split_groups(self, received: set[int]) -> None:
        """Split the groups of which only some parameters received a gradient."""
        groups: list[tuple[list[int], Array]] = []
        for members, state in self._groups:
            updated = [number for number in members if number in received]
            others = [number for number in members if number not in received]
            if updated and others:
                refuse_in_step("leaves out a parameter that was updated before", in_rehearsal=False)
                copied = self.device.zeros((STATE_SIZE,))
                self.device.copy(state, copied)
                groups += [(updated, copied), (others, state)]
            else:
                groups.append((members, state))
        self._groups = groups


def _check(parameters: list[Tensor]) -> None:
    if not parameters:
        raise WgradError("an optimizer needs parameters, got none; pass a list of Tensors")
    for number, p in enumerate(parameters):
        problem = ""
        if not isinstance(p, Tensor):
            problem = f"is a {type(p).__name__}: pass Tensors"
        elif not p.requires_grad or p.node is not None:
            problem = "is no leaf that requires a gradient: make it with wgrad.tensor(..., requires_grad=True)"
        elif p.dtype != np.float32:
            problem = f"is {p.dtype}: convert it to float32"
        elif p.device is not parameters[0].device:
            problem = "is on another device than the first: move it there"
        elif any(p is other for other in parameters[:number]):
            problem = "is there twice: pass it once"
        elif p.has_grad_buffer:
            problem = "belongs to another optimizer already: remove it from one"
        if problem:
            raise WgradError(f"parameter {number} of an optimizer {problem}")
