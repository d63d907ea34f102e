"""Arguments with which the self-test calls each operator, for code that needs one call of every operator."""

from __future__ import annotations

from functools import cache
from typing import Any

from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import upload_inputs
from wgrad.autograd.selftest.cases import cases


class _Recorder(ReferenceDevice):
    """A reference device that keeps the arguments of the first call of each operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, dict[str, Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATORS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.made.setdefault(name, OPERATORS[name].signature.bind(*args, **options).arguments)
            return found(*args, **options)

        return call


@cache
def first_call(op: str) -> dict[str, Any]:
    """Return the arguments of an operator's first float32 case, by name, with NumPy arrays as the call left them.

    Raises StopIteration if the operator has no case.
    """
    case = next(case for case in cases(float16=False) if case.op == op)
    device = _Recorder()
    case.call(device, upload_inputs(device, case.inputs()))
    return device.made[op]
