"""The wgpu device: the runtime, and the table of its operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.implementations import enter_all
from wgrad.device.memory import Array
from wgrad.device.roof import Roof
from wgrad.wgsl import kept_weights
from wgrad.wgsl.elementwise import elementwise
from wgrad.wgsl.gemm.plan import Limits, linear_plan
from wgrad.wgsl.operators import implements
from wgrad.wgsl.roofline import roofs
from wgrad.wgsl.runtime import adapters, matrix_units
from wgrad.wgsl.runtime.adapters import list_adapters
from wgrad.wgsl.runtime.compile import Compiler
from wgrad.wgsl.runtime.driver_caches import driver_caches
from wgrad.wgsl.runtime.dry_run import DryRun, prepare
from wgrad.wgsl.runtime.reopen import reopen
from wgrad.wgsl.runtime.runtime import Runtime
from wgrad.wgsl.runtime.transfers import BYTES_PER_FLOP

__all__ = ["WgpuDevice", "list_adapters"]

enter_all("wgrad.wgsl", above=("planned_gpu", "webgpu_trace"))
SUBGROUPS, TENSOR_CORES = "subgroup operations", "tensor cores"


class WgpuDevice(Runtime):
    """The device of the contract (device/contract.py) in WGSL through wgpu; autograd/bind.py adds its operators.

    spec: None (best adapter), an index or a part of an adapter's name. max_binding_bytes lowers the device's own limit,
    so that tests reach the paths for arrays larger than one binding.
    """

    implementations = implements
    reopens = True

    if TYPE_CHECKING:  # the operators, as in the contract

        def __getattr__(self, name: str) -> Any: ...

    def _new_compiler(self) -> Compiler:
        made = super()._new_compiler()
        made.before = self._end_of_timing
        return made

    def _end_of_timing(self) -> None:
        """Exclude the compilation that follows from the measured rate of the device."""
        if self._replay is None and not self._transfers:  # transfers wait for large launches to overlap with
            self.synchronize()

    def free_memory(self) -> int | None:
        return adapters.free_memory(self._adapter)

    def copied_alongside(self, work: float) -> float:
        return work * BYTES_PER_FLOP if self.copies_beside and self.host_buffers else 0.0

    def copy(self, src: Array, out: Array) -> None:
        elementwise.copy(self, src, out)

    def reopen(self, losses: int) -> Any:
        return reopen(self, losses)

    def dequantized_bytes(self, weight: FrozenWeight | Array, rows: int, dtype: Any, experts: int = 0) -> int:
        return kept_weights.nbytes(self, weight, rows, np.dtype(dtype), experts)

    def keep_dequantized(self, weight: FrozenWeight | Array, rows: int, dtype: Any, experts: int = 0) -> None:
        kept_weights.keep(self, weight, rows, np.dtype(dtype), experts)

    def forget_dequantized(self) -> None:
        self.dequantized.forget()

    def round_products(self) -> None:
        if self.matrix_units:
            raise DeviceError("the tensor cores, which are in use on this GPU, are faster and more exact")
        self.int8_products = True

    @property
    def identity(self) -> tuple[str, ...]:
        return (self.facts["backend"], self.facts["library"], self._card)

    @property
    def _card(self) -> str:
        return matrix_units.identity(self.facts["name"], self.facts["driver"])

    @property
    def simpler(self) -> tuple[str, ...]:
        return (SUBGROUPS,) * self.subgroups + (TENSOR_CORES,) * self.matrix_units

    @contextmanager
    def trying_without(self, kinds: Collection[str]) -> Iterator[None]:
        before = self.subgroups, self.matrix_units, self.stacks_weights
        self.subgroups = self.subgroups and SUBGROUPS not in kinds
        if TENSOR_CORES in kinds:
            self.matrix_units = self.stacks_weights = False
        try:
            yield
        finally:
            self.subgroups, self.matrix_units, self.stacks_weights = before

    def turn_off(self, kind: str, reason: str) -> bool:
        if kind == SUBGROUPS:
            self.subgroups = False
            return True
        self.matrix_units = self.stacks_weights = False
        self.tensor_cores_off = reason
        with suppress(DeviceError):  # where it cannot be kept, the next run finds it again
            matrix_units.keep_verdict(self._card, False, reason)  # `wgrad matrix-units enable` checks again
        return False

    def roofs(self) -> list[Roof]:
        return roofs.roofs(self)

    def explain_linear(self, mnk: tuple[int, int, int], weight: str, backward: bool) -> str:
        return str(linear_plan(mnk, self.fastest_compute, weight, backward, Limits.of(self)))

    def dry_run(self) -> DryRunDevice:
        """Return a device that only records what this one would launch and allocate; see dry_run.py."""
        return DryRunDevice(self)

    def kernel_caches(self) -> list[Path]:
        """Return folders in which a driver may keep compiled shaders; see driver_caches.py."""
        return driver_caches()

    def prepare(self, dry: DryRunDevice, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile what the work on `dry` needs; see the contract."""
        return prepare(self, dry, progress)


class DryRunDevice(DryRun, WgpuDevice):
    """The same operators, on a device where nothing runs."""
