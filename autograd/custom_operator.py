"""Custom elementwise operators: a WGSL expression, its NumPy reference, and its gradient.

They fuse with neighboring operators, and are checked like built-in ones.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.custom_check import check_gradients, check_results, check_types
from wgrad.autograd.gradcheck import gradcheck
from wgrad.autograd.lazy import Lazy
from wgrad.autograd.modes import no_grad
from wgrad.autograd.ops.arithmetic import GRADIENTS, elementwise
from wgrad.autograd.selftest.fused import custom_cases
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.expression import BUILT_IN, FUNCTIONS, ElementwiseFunction, add_function

# Names of an expression but those of functions and of parts of a vector; names of types among them.
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?!\w|\s*[(<])")
_TYPE = re.compile(r"[fiu]32|f16|bool|true|false|(vec|mat)\d\w*")
_SIZE = (7, 41)  # shape of the gradient check, a multiple of no block size


class CustomOperator:
    """A custom elementwise operator. Call it with Tensors, arrays and numbers, of which at least one is a Tensor.

    Attributes:
        name: Its name.
        parameters: Names of its arguments.
    """

    def __init__(self, name: str, parameters: Sequence[str], domain: tuple[float, float]) -> None:
        self.name = self.__name__ = name
        self.parameters = tuple(parameters)
        self._domain = domain

    def __call__(self, *operands: Any) -> Tensor:
        if len(operands) != len(self.parameters):
            raise WgradError(f"{self.name} takes {', '.join(self.parameters)}, got {len(operands)} arguments")
        return elementwise(self.name, *operands)

    def check(self, device: Device) -> float:
        """Compare the WGSL with the reference in float64, and the gradient with central differences, on a device.

        `cpu` runs the reference, so the WGSL is not checked there.

        Returns:
            The largest relative difference between a gradient and central differences.

        Raises:
            WgradError: One of them is wrong.
        """
        check_results(self.name, custom_cases(self.name, len(self.parameters), self._domain, device.float16), device)
        return check_gradients(self.name, self._gradient_error, device)

    def _gradient_error(self, device: Any, dtype: Any) -> float:
        """Check gradients at inputs inside the domain, whatever gradcheck does to them first."""
        rng = np.random.default_rng(0)
        low, high = self._domain
        inputs = [rng.uniform(low, high, _SIZE) for _ in self.parameters]
        middle, half = (low + high) / 2, (high - low) / 2

        def inside(*tensors: Tensor) -> Tensor:
            return self(*((x * 0.3).tanh() * (half * 0.9) + middle for x in tensors))

        return gradcheck(inside, *inputs, rng=rng, device=device, dtype=dtype)


def register_operator(
    name: str,
    *,
    wgsl: str,
    reference: Callable[..., Any],
    backward: Callable[..., Any],
    helper: str = "",
    domain: tuple[float, float] = (-3.0, 3.0),
) -> CustomOperator:
    """Register an elementwise operator.

    Args:
        name: Unique name of the operator.
        wgsl: A WGSL expression of f32, in which arguments have the names of `reference`'s parameters.
        reference: The same function in NumPy, for arrays in float32 or float64.
        backward: Function of the output's gradient and the arguments, all Tensors. It returns a tuple with a gradient
            for each argument (None: it has none), written with operators of Tensors.
        helper: WGSL functions that the expression calls.
        domain: Smallest and largest argument that `check` tries.

    Returns:
        The operator, a function of Tensors. Its method `check(device)` checks WGSL and gradient.

    Raises:
        WgradError: The name is taken, an argument is not in the expression, or the reference does not run.
    """
    check_types(
        "register_operator", name, {"wgsl": wgsl, "helper": helper}, {"reference": reference, "backward": backward}
    )
    parameters = list(inspect.signature(reference).parameters)
    for unknown in _NAME.findall(re.sub(r"//.*", "", wgsl)):
        if unknown not in parameters and not _TYPE.fullmatch(unknown) and unknown not in re.findall(r"\w+", helper):
            raise WgradError(
                f"register_operator: {name}: the expression {wgsl!r} has {unknown}, which is no parameter of reference "
                f"({', '.join(parameters)})"
            )
    text = wgsl
    for number, parameter in enumerate(parameters):
        text, count = re.subn(rf"(?<![\w.]){parameter}(?!\w)", f"(${number})", text)
        if not count:
            raise WgradError(f"register_operator: {name}: the expression {wgsl!r} does not use {parameter}")
    if not parameters or len(parameters) > 3:
        raise WgradError(f"register_operator: {name}: reference must have 1 to 3 parameters, got {len(parameters)}")
    if not domain[0] < domain[1]:
        raise WgradError(f"register_operator: {name}: domain must be a smallest and a largest number, got {domain}")
    _try(name, reference, len(parameters), domain)
    add_function(name, ElementwiseFunction(len(parameters), reference, text, helper))
    GRADIENTS[name] = _gradients(name, parameters, backward)
    return CustomOperator(name, parameters, domain)


def unregister_operator(name: str) -> None:
    """Remove an operator of `register_operator`."""
    if name in BUILT_IN or name not in FUNCTIONS:
        raise WgradError(f"unregister_operator: {name} is no operator that was registered")
    del FUNCTIONS[name], GRADIENTS[name]


def _try(name: str, reference: Callable[..., Any], count: int, domain: tuple[float, float]) -> None:
    for dtype in (np.float32, np.float64):
        x = np.linspace(*domain, 5, dtype=dtype)
        try:
            with np.errstate(all="ignore"):
                y = reference(*[x] * count)
        except Exception as error:
            raise WgradError(f"register_operator: {name}: the reference fails: {error}") from error
        if getattr(y, "shape", None) != x.shape or y.dtype != dtype:
            found = f"{getattr(y, 'dtype', type(y).__name__)} {list(getattr(y, 'shape', ()))}"
            wanted = f"{np.dtype(dtype)} [5]"
            raise WgradError(
                f"register_operator: {name}: the reference must keep shape and dtype, {wanted}, got {found}"
            )
        if not np.isfinite(y).all():
            raise WgradError(
                f"register_operator: {name}: the reference is {y[~np.isfinite(y)][0]} for {x[~np.isfinite(y)][0]:g}; "
                "give a domain in which it is finite"
            )


def _gradients(name: str, parameters: Sequence[str], backward: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(dy: Lazy, *operands: Any) -> list[Lazy | None]:
        given = [Tensor(x, dy.device) if isinstance(x, Lazy) else x for x in operands]
        with no_grad():
            found = backward(Tensor(dy, dy.device), *given)
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(parameters):
            raise WgradError(f"{name}: backward must return {len(parameters)} gradients, got {len(found)}")
        return [None if grad is None else _gradient(name, grad, dy) for grad in found]

    return gradients


def _gradient(name: str, grad: Any, dy: Lazy) -> Lazy:
    if not isinstance(grad, Tensor | int | float):
        raise WgradError(f"{name}: a gradient must be a Tensor or None, got {type(grad).__name__}; use Tensors")
    lazy = grad.lazy() if isinstance(grad, Tensor) else dy * 0.0 + float(grad)
    if lazy.shape != dy.shape:
        raise WgradError(f"{name}: a gradient must have the shape of dy {list(dy.shape)}, got {list(lazy.shape)}")
    return lazy
