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
        offsets, size = [], 0
        for p in self.parameters:
            offsets.append(size)
            size += -(-p.size // _ALIGN) * _ALIGN
        self._data, self._grad = device.zeros((size,)), device.zeros((size,))
        before_writing()
        for p, at in zip(self.parameters, offsets):
            data, grad = (device.view(whole, p.shape, at) for whole in (self._data, self._grad))
            device.copy(p.data, data)
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
        """Set the gradients to 0. Their memory stays, whatever PyTorch's `set_to_none` is."""
        before_writing([self._grad])
        self.device.fill(self._grad, 0.0)

    def step(self) -> None:
        """Update the parameters by their gradients."""
        before_writing([self._data, self._grad])
        self._step()

    def _step(self) -> None:
        raise NotImplementedError

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

    def _step(self) -> None:
        change: Array = self._grad
        decay: Program = (("old",), ("load", 0), ("scalar", 0), ("mul", 0, 2), ("add", 1, 3))  # g + decay * p
        if self._moved is not None:
            program = (
                *(("old",), ("load", 0), ("load", 1), ("scalar", 0), ("scalar", 1)),
                *(("mul", 0, 3), ("mul", 2, 4), ("add", 5, 1), ("add", 7, 6)),
            )
            self._flat(program, (self._grad, self._data), (self._momentum, self._decay), self._moved)
            change = self._moved
            decay = (("old",), ("load", 0))
        rate = len(decay)
        step = (*decay, ("load", 1), ("mul", rate - 1, rate), ("sub", 0, rate + 1))
        scalars = () if self._moved is not None else (self._decay,)
        self._flat(step, (change, self._hyper), scalars, self._data)


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
        self._state, self._loss_scale = device.zeros((STATE_SIZE,)), device.upload(np.ones(1, np.float32))
        self._no_norm = device.zeros((2,))

    def _step(self) -> None:
        device, (beta1, beta2) = self.device, self._betas
        norm = device.grad_norm(self._grad) if self._max_norm else self._no_norm
        device.clip(norm, self._hyper, self._state, self._loss_scale, beta1=beta1, beta2=beta2)
        buffers = self._data, self._grad, self._mean, self._square, self._hyper, self._state
        decay = {"weight_decay": self._decay, "decay_elements": math.prod(self._data.shape)}
        device.adamw(*buffers, beta1=beta1, beta2=beta2, eps=self._eps, **decay)


def _check(parameters: list[Tensor]) -> None:
    if not parameters:
        raise WgradError("an optimizer needs parameters, got none; pass a list of Tensors")
    for number, p in enumerate(parameters):
        problem = ""
        if not isinstance(p, Tensor):
            problem = f"is a {type(p).__name__}, no Tensor"
        elif not p.requires_grad or p.node is not None:
            problem = "is no leaf that requires a gradient: make it with wgrad.tensor(..., requires_grad=True)"
        elif p.dtype != np.float32:
            problem = f"is {p.dtype}: parameters are float32"
        elif p.device is not parameters[0].device:
            problem = "is on another device than the first"
        elif any(p is other for other in parameters[:number]):
            problem = "is there twice"
        elif p.has_grad_buffer:
            problem = "belongs to another optimizer already"
        if problem:
            raise WgradError(f"parameter {number} of an optimizer {problem}")
