"""The HIP device: the runtime with the table of all HIP operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgrad.device.cache import cache_folder
from wgrad.device.errors import DeviceError
from wgrad.device.implementations import enter_all
from wgrad.device.roof import Expectation
from wgrad.hip.attention.attention import AttentionRounding
from wgrad.hip.elements import implements
from wgrad.hip.expected import expect
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.dry_run import DryRun
from wgrad.hip.runtime.gpus import list_gpus
from wgrad.hip.runtime.system import describe_system, read_sensors

__all__ = ["HipDevice", "list_gpus"]

enter_all("wgrad.hip")


class HipDevice(AttentionRounding):
    """The contract (device/contract.py) in HIP through hip-python.

    Args:
        gpu: Number of the GPU, part of its label, or one of `list_gpus`; empty: the best.
        exact_blocks: Allocate exactly each array's size, for tests of accesses out of range.

    Raises:
        DeviceError: hip-python, the driver or a GPU is missing, or the GPU's architecture has no kernels.
    """

    implementations = implements

    def details(self) -> dict[str, Any]:
        """The system around the GPU, versions of HIP, and where the kernels come from."""
        versions = {
            "driver": binding.driver_version(),
            "runtime": binding.runtime_version(),
            "package": binding.package(),
        }
        modules = self.modules
        kernels = {
            "origin": modules.origin,
            "digest": modules.digest(),
            "loaded": modules.loaded(),
            "refused": modules.refused,
        }
        return {"hip": versions, "kernels": kernels, "system": describe_system()}

    def kernels_of(self, work: Callable[[Any], object]) -> list[tuple[str, str]]:
        """Return source and name of each kernel that `work` launches on this device."""
        dry = self.dry_run()
        work(dry)
        return list(dry.kernels)

    def expect(self, kernels: Sequence[tuple[str, str]], flop: float, nbytes: float) -> Expectation | None:
        """Return the prediction of a model of the machine code."""
        return expect(self.facts, kernels, flop, nbytes)

    def sensors(self) -> dict[str, float]:
        """Return clocks, power and temperature of the GPU that draws most power."""
        return read_sensors()

    def kernel_caches(self) -> list[Path]:
        """Return the folders of kernels that hiprtc compiled; the others ship with the package."""
        return [cache_folder("hip")]

    def dry_run(self) -> DryRunDevice:
        """Return a device that only records this one's launches and memory; see dry_run.py."""
        return DryRunDevice(self)

    def round_products(self) -> None:
        raise DeviceError("the matrix cores of HIP GPUs are faster and more exact")

    if TYPE_CHECKING:  # the operators: `autograd/bind.py` makes them methods

        def __getattr__(self, name: str) -> Any: ...


class DryRunDevice(DryRun, HipDevice):
    """The HIP device without execution: operators only record their launches."""
