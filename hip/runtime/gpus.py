"""The GPUs that HIP finds: their properties, whether wgrad can use them, and lookup by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.device.whole_numbers import whole_number
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.architectures import check_supported, is_rdna


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU, as its driver reports them. Clocks are maxima, 0 where unknown.

    problem: Why wgrad cannot use it; empty where it can.
    """

    index: int
    name: str
    architecture: str = ""
    wave: int = 0
    compute_units: int = 0
    memory_bytes: int = 0
    integrated: bool = False
    clock_hz: float = 0.0
    memory_clock_hz: float = 0.0
    memory_bus_bits: int = 0
    problem: str = ""

    @property
    def label(self) -> str:
        """Name, architecture and size in one line."""
        return f"{self.name} ({self.architecture}, HIP, {self.compute_units} compute units)"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the entries of `Device.facts` (device/contract.py)."""
        return {
            "name": self.name,
            "backend": "HIP",
            "type": "IntegratedGPU" if self.integrated else "DiscreteGPU",
            "architecture": self.architecture,
            "driver": f"HIP {binding.driver_version()}",
            "memory_bytes": self.memory_bytes,
            "compute_units": self.compute_units,
            "clock_mhz": round(self.clock_hz / 1e6),
            "memory_clock_mhz": round(self.memory_clock_hz / 1e6),
            "memory_bus_bits": self.memory_bus_bits,
        }


def list_gpus() -> list[Gpu]:
    """Return every GPU, best first: usable before others, discrete before integrated, then by size.

    Raises:
        NoGpu: There is no hip-python, no driver or no GPU.
        DeviceError: The driver fails.
    """
    found = [_read(index) for index in range(binding.device_count())]
    return sorted(found, key=lambda g: (bool(g.problem), g.integrated, -g.compute_units, -g.memory_bytes, g.index))


def find_gpu(wanted: str = "") -> Gpu:
    """Return the GPU of this number, or the best whose label contains this text; empty: the best of all.

    Raises:
        DeviceError: There is no such GPU, or wgrad cannot use it.
    """
    gpus = list_gpus()
    found = gpus
    if wanted:
        index = whole_number(wanted)
        found = [g for g in gpus if (wanted.lower() in g.label.lower() if index is None else g.index == index)]
    if not found:
        raise DeviceError(f"HIP has no GPU '{wanted}'; it has {names(gpus)}")
    if found[0].problem:
        raise DeviceError(found[0].problem)
    return found[0]


def names(gpus: Sequence[Gpu]) -> str:
    """Format numbers and names of GPUs for a message."""
    return ", ".join(f"{g.index} {g.name}" for g in sorted(gpus, key=lambda g: g.index))


def _read(index: int) -> Gpu:
    try:
        properties = binding.device_properties(index)
    except DeviceError as error:  # the others may work
        return Gpu(index, f"GPU {index}", problem=str(error))
    architecture = binding.to_text(properties.gcnArchName).partition(":")[0]
    name = binding.to_text(properties.name)
    try:
        check_supported(architecture, name)
        problem = ""
    except DeviceError as error:
        problem = str(error)
    # The driver counts work-group processors, which are two compute units each, unless its flag says otherwise.
    pairs = is_rdna(architecture) and os.environ.get("GPU_ENABLE_WGP_MODE", "1") != "0"
    return Gpu(
        index=index,
        name=name,
        architecture=architecture,
        wave=int(properties.warpSize),
        compute_units=int(properties.multiProcessorCount) * (2 if pairs else 1),
        memory_bytes=int(properties.totalGlobalMem),
        integrated=bool(getattr(properties, "integrated", 0)),
        clock_hz=1e3 * getattr(properties, "clockRate", 0),
        memory_clock_hz=1e3 * getattr(properties, "memoryClockRate", 0),
        memory_bus_bits=int(getattr(properties, "memoryBusWidth", 0)),
        problem=problem,
    )
