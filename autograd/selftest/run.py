"""`wgrad selftest`: check every operator of a device, forward and backward, against the float64 reference.

Limits are not set by hand. A limit is a multiple (2 forward, 3 backward) of the error of the reference in the same
precision on the same inputs, plus some units in the last place of the output's largest value. If that is 0, the units
refer to the terms that cancel, since the order of rounding decides whether the reference itself gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case, Inputs, Outputs, upload_inputs, widen_inputs
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.finish import FINISH
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.matrix import matrix_cases
from wgrad.autograd.selftest.matrix_kernels import bfloat16_cases, kernel_cases
from wgrad.autograd.selftest.transposed import transposed_cases
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceLost, OperatorMissing

MULTIPLE = {"forward": 2.0, "backward": 3.0}
EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Result:
    """Result of a case on a device, for the output with the largest error relative to its limit.

    error: largest absolute difference from the oracle; limit: largest one allowed.
    """

    name: str
    op: str
    direction: str
    dtype: str
    shape: str
    output: str
    error: float
    limit: float
    ok: bool
    message: str = ""
    lacks: str = ""  # the operator that the device declares to lack; the case did not run


def largest_difference(value: np.ndarray, oracle: np.ndarray) -> float:
    """Return max |value - oracle|; infinity if the shapes differ or a value is not finite."""
    if value.shape != oracle.shape:
        return float("inf")
    if value.size == 0:
        return 0.0
    error = float(np.max(np.abs(value.astype(np.float64) - oracle.astype(np.float64))))
    return error if np.isfinite(error) else float("inf")


def to_host(case: Case, device: Device, outputs: Outputs) -> dict[str, np.ndarray]:
    """Download the outputs of a case's call and compute those that are judged."""
    return FINISH[case.finish]({name: device.download(array) for name, array in outputs.items()})


@dataclass(frozen=True)
class Expected:
    """The oracle's values in float64, the largest differences allowed, and the dtypes on a device, by output."""

    oracle: dict[str, np.ndarray]
    limits: dict[str, float]
    dtypes: dict[str, np.dtype]


def expected_outputs(case: Case, inputs: Inputs | None = None) -> Expected:
    """Return the reference's outputs for a case. inputs: the case's own; None: build them."""
    reference, inputs = ReferenceDevice(), case.inputs() if inputs is None else inputs
    oracle = to_host(case, reference, case.call(reference, widen_inputs(inputs)))
    plain = to_host(case, reference, case.call(reference, upload_inputs(reference, inputs)))
    limits = {}
    for name, value in oracle.items():
        if value.dtype.kind in "iu":
            limits[name] = 0.0
            continue
        scale = (float(np.max(np.abs(value))) if value.size else 0.0) or case.cancels
        limits[name] = MULTIPLE[case.direction] * largest_difference(plain[name], value) + case.ulps * EPSILON * scale
    return Expected(oracle, limits, {name: value.dtype for name, value in plain.items()})


def judge(case: Case, expected: Expected, found: dict[str, np.ndarray]) -> Result:
    """Return the result for the output with the largest error relative to its limit; infinite for a wrong dtype."""
    worst = ("", 0.0, 0.0, -1.0)
    for name, value in expected.oracle.items():
        same = found[name].dtype == expected.dtypes[name]
        error, limit = largest_difference(found[name], value) if same else float("inf"), expected.limits[name]
        badness = error / limit if limit > 0 else (0.0 if error == 0 else float("inf"))
        if badness > worst[3]:
            worst = (name, error, limit, badness)
    output, error, limit, badness = worst
    right = not output or found[output].dtype == expected.dtypes[output]
    message = "" if right else f"{output} is {found[output].dtype}, should be {expected.dtypes[output]}"
    return _result(case, output, error, limit, badness <= 1.0, message)


def _result(case: Case, output: str, error: float, limit: float, ok: bool, message: str) -> Result:
    return Result(case.name, case.op, case.direction, case.dtype, case.shape, output, error, limit, ok, message)


def call_case(case: Case, device: Any, inputs: Inputs | None = None) -> Outputs:
    """Call the case's operator on a device, or on its dry run. inputs: as for `expected_outputs`."""
    with device.planned_for(case.compute_units) if case.compute_units else nullcontext():
        return case.call(device, upload_inputs(device, case.inputs() if inputs is None else inputs))


def check_case(case: Case, device: Device) -> Result:
    """Run a case on a device. Raises the device's errors (OutOfMemory, DeviceLost)."""
    inputs = case.inputs()  # built once, since this takes longer than most calls
    return _check(case, device, inputs, expected_outputs(case, inputs))


def _check(case: Case, device: Device, inputs: Inputs, expected: Expected) -> Result:
    found = to_host(case, device, call_case(case, device, inputs))
    if set(found) != set(expected.oracle):
        raise KeyError(
            f"{case.name}: outputs {sorted(found)} on {device.name}, {sorted(expected.oracle)} on the reference"
        )
    return judge(case, expected, found)


def selftest_cases(device: Device, only: str = "") -> list[Case]:
    """Return the cases that a device must pass and whose names contain `only`."""
    more = matrix_cases() if getattr(device, "matrix_units", False) else []
    if hasattr(device, "int8_products"):
        more += int8_cases(device.float16)
    if hasattr(device, "transposes_left"):
        more += transposed_cases(device.float16)
    if hasattr(device, "planned_for"):
        more = [*bfloat16_cases(), *kernel_cases()]
    return [case for case in [*cases(device.float16), *more] if only in case.name]


def prepare_selftest(
    device: Device,
    selected: Iterable[Case],
    progress: Callable[[int, int], None] | None = None,
    inputs: Mapping[str, Inputs] | None = None,
) -> int:
    """Compile the kernels of cases before they run, if the device can, and return their number.

    inputs: inputs by name of the case; None: build them.
    """
    dry = device.dry_run()
    if dry is None:
        return 0
    for case in selected:
        with suppress(Exception):  # reported when the case runs
            call_case(case, dry, inputs[case.name] if inputs else None)
    return device.prepare(dry, progress)


def run_selftest(
    device: Device,
    *,
    only: str = "",
    progress: Callable[[Result], Any] | None = None,
    selected: Iterable[Case] | None = None,
) -> list[Result]:
    """Check the cases `selected`, or all whose names contain `only`, on a device.

    An operator that raises gives a failed result with its message, so that the user of an unknown GPU sees the whole
    table. Cases of operators that the device declares to lack do not run.

    Raises:
        DeviceLost: A case lost the device; the message names it.
    """
    results = []
    for case in selftest_cases(device, only) if selected is None else selected:
        result = _attempt(case, partial(check_case, case, device))
        results.append(result)
        if progress is not None:
            progress(result)
    return results


def compile_and_check(device: Device, selected: Sequence[Case]) -> list[Result]:
    """Check cases like `run_selftest`, but compile all their kernels together first.

    Meanwhile another thread computes the references. Raises DeviceLost as `run_selftest` does.
    """
    inputs = {case.name: case.inputs() for case in selected}
    with ThreadPoolExecutor(1) as pool:
        expected = {case.name: pool.submit(expected_outputs, case, inputs[case.name]) for case in selected}
        prepare_selftest(device, selected, inputs=inputs)

    def check(case: Case) -> Result:
        return _check(case, device, inputs[case.name], expected[case.name].result())

    return [_attempt(case, partial(check, case)) for case in selected]


def _attempt(case: Case, check: Callable[[], Result]) -> Result:
    try:
        return check()
    except OperatorMissing as error:
        return replace(_result(case, "", 0.0, 0.0, True, ""), lacks=error.operator)
    except DeviceLost as error:  # no later case can run
        raise DeviceLost(f"{case.name}: {error}") from error
    except Exception as error:
        return _result(case, "", float("inf"), 0.0, False, f"{type(error).__name__}: {error}")
