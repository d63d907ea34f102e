"""A HIP device whose kernels are the compiled code objects, executed instruction by instruction on the CPU.

So the launch code, the objects that ship and the operators are tested together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from tests.hip.executor.binding import Binding, Execution
from tests.hip.executor.code_object import CodeObject, ExecutorError
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.table import OBJECTS
from tests.hip.executor.waves import Order
from wgrad.autograd.bind import bind
from wgrad.hip.device import HipDevice
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.compile import Modules
from wgrad.hip.runtime.objects import find_object, read_object


@cache
def shipped(source: str, architecture: str) -> CodeObject:
    """The code object of <source>.hip that ships.

    Raises:
        ExecutorError: there is none.
    """
    path = find_object(OBJECTS, architecture, source)
    if path is None:
        raise ExecutorError(f"no code object of {source}.hip for {architecture}: run `make objects`")
    return CodeObject(read_object(path), architecture, str(path))


class ExecutedModules(Modules):
    """The executor's kernels by name."""

    def get(self, source: str, kernel: str) -> Any:
        if (source, kernel) not in self._functions:
            self._functions[source, kernel] = Kernel(shipped(source, self.architecture), kernel)
            self.compiled += 1
        return self._functions[source, kernel]


@contextmanager
def _stand_in(fake: Binding) -> Iterator[None]:
    before = binding._bindings.get("hip")
    binding._bindings["hip"] = fake
    try:
        yield
    finally:
        del binding._bindings["hip"]
        if before is not None:
            binding._bindings["hip"] = before


@bind
class ExecutedDevice(HipDevice):
    """Every operator, on the machine code of one architecture. Memory that was not written reads as NaN."""

    binding: type[Binding] = Binding

    def __init__(self, architecture: str) -> None:
        with _stand_in(self.binding(architecture, 64 if architecture.startswith("gfx9") else 32)):
            super().__init__(exact_blocks=True)
        self.modules = ExecutedModules(architecture)

    @property
    def order(self) -> Order:
        """The order in which waves run between barriers."""
        found: Order = self._hip.order
        return found

    @order.setter
    def order(self, value: Order) -> None:
        self._hip.order = value

    @property
    def execution(self) -> Execution:
        """The instructions executed so far."""
        found: Execution = self._hip.execution
        return found

    def forget(self) -> None:
        self._hip.execution = Execution()

    def empty(self, shape: Any, dtype: Any = np.float32) -> Any:
        array = super().empty(shape, dtype)
        if self._replay is None:  # a block that was used before
            ctypes.memset(array.address, 0xFF, array.lease.block.nbytes)
        return array
