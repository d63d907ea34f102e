"""Checks of custom operators: WGSL compared with the reference, gradients compared with finite differences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from wgrad.autograd.gradcheck import LIMIT
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.run import check_case
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, WgradError

_FLOAT32_GRADIENT = 1e-3  # limit of a float32 gradient compared with central differences in float64


def check_types(function: str, name: Any, texts: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Raise WgradError if an argument of register_operator or register_shader has another type."""
    for argument, value in ({"name": name} | dict(texts)).items():
        if not isinstance(value, str):
            raise WgradError(f"{function}: {argument} must be text, got {type(value).__name__}")
    for argument, value in functions.items():
        if not callable(value):
            raise WgradError(f"{function}: {name}: {argument} must be a function, got {type(value).__name__}")


def check_results(name: str, cases: Iterable[Case], device: Device) -> None:
    """Raise WgradError if a result on the device differs from the reference."""
    for case in cases:
        try:
            result = check_case(case, device)
        except DeviceError as error:
            found = re.search(r"(?s)(parsing error|Shader validation error): .*|Error matching shader .*", str(error))
            raise WgradError(
                f"{name}: its WGSL does not run on {device.name}: {found[0].rstrip() if found else error}"
            ) from error
        if not result.ok:
            raise WgradError(
                f"{name}: its WGSL is off by {result.error:.3g} from the reference in {case.dtype} on {device.name}, "
                f"allowed {result.limit:.3g}; {result.message or 'correct one of them'}"
            )


def check_gradients(name: str, error_on: Callable[[Any, Any], float], device: Device) -> float:
    """Return the largest relative difference of a gradient from central differences on the device.

    error_on: returns it for a device and a dtype. WgradError: it is too large there, or in float64 in NumPy.
    """
    error = 0.0
    for where, dtype, limit in ((ReferenceDevice(), np.float64, LIMIT), (device, np.float32, _FLOAT32_GRADIENT)):
        error = error_on(where, dtype)
        if not error <= limit:
            raise WgradError(
                f"{name}: its backward differs from central differences by {error:.3g} of the largest gradient on "
                f"{where.name}, allowed {limit:.3g}; correct backward"
            )
    return error
