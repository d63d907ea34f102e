"""Read the files, device nodes and drivers that a GPU needs, for diagnosis.py."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgrad.autograd.matrix_units import left_idle
from wgrad.autograd.select_device import list_devices, select_device
from wgrad.device.files import read_small
from wgrad.wgsl.runtime.vulkan_drivers import driver_files

LOADER = "libvulkan.so.1"
VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}  # PCI
_MEMORY = 0x200  # IORESOURCE_MEM, a flag of windows in /sys/bus/pci/devices/*/resource
_OTHER_BITS = re.compile(r"i[3-6]86|armhf")  # 32-bit drivers, which this process cannot load


@dataclass(frozen=True)
class VulkanDriver:
    """A file that registers a driver with Vulkan's loader."""

    file: Path
    library: str  # named by the file; "": it cannot be read
    opens: bool  # whether the library can be loaded

    @property
    def vendor(self) -> str:
        """Vendor of its GPUs, by the usual names of such files; "": not known."""
        name = self.file.name.lower()
        marks = {"nvidia": "NVIDIA", "radeon": "AMD", "amd": "AMD", "intel": "Intel"}
        return next((vendor for mark, vendor in marks.items() if mark in name), "")


@dataclass(frozen=True)
class Machine:
    """The parts of a machine that matter for GPUs.

    Attributes:
        system: As of `platform.system`.
        environment: Environment variables.
        devices: As of `list_devices`.
        loads: Returns whether the linker finds a library by a name or path.
        imports: Returns whether a Python package is installed.
        permitted: Returns whether a file may be read and written.
        idle_units: Advice about unused tensor cores; "": none.
        root: Root of the file system, for tests.
        kernel: Version of the system's kernel.
    """

    system: str
    environment: Mapping[str, str]
    devices: Sequence[Mapping[str, Any]]
    loads: Callable[[str], bool]
    imports: Callable[[str], bool]
    permitted: Callable[[Path], bool]
    idle_units: str = ""
    root: Path = field(default_factory=lambda: Path("/"))
    kernel: str = ""

    @property
    def adapters(self) -> list[Mapping[str, Any]]:
        """Devices that wgpu can use, including software drivers."""
        return [d for d in self.devices if str(d["spec"]).startswith("wgpu:") and d.get("usable", True)]

    @property
    def cards(self) -> list[Mapping[str, Any]]:
        """GPUs that wgpu can use."""
        return [adapter for adapter in self.adapters if adapter["type"] != "CPU"]

    def pci_vendors(self) -> list[str]:
        """Return the vendors of the GPUs in the machine, with or without a driver (Linux)."""
        found = set()
        for folder in sorted(self.root.glob("sys/bus/pci/devices/*")):
            if read_small(folder / "class").startswith("0x03"):  # display controllers
                found.add(VENDORS.get(int(read_small(folder / "vendor") or "0", 16), ""))
        return sorted(found - {""})

    def bar_bytes(self, vendor_id: int) -> int | None:
        """Return the largest memory window that a GPU of a vendor exposes to the CPU (Linux); None: not known.

        Of several GPUs, the smallest counts.
        """
        found = []
        for folder in self.root.glob("sys/bus/pci/devices/*"):
            if (
                read_small(folder / "class").startswith("0x03")
                and int(read_small(folder / "vendor") or "0", 16) == vendor_id
            ):
                windows = re.findall(r"^(0x\w+) (0x\w+) (0x\w+)$", read_small(folder / "resource"), re.MULTILINE)
                sizes = [int(end, 16) - int(start, 16) + 1 for start, end, flags in windows if int(flags, 16) & _MEMORY]
                found += [max(sizes)] if sizes else []
        return min(found, default=None)

    def nodes(self, *patterns: str) -> list[Path]:
        """Return the device nodes that match patterns below /dev."""
        return [path for pattern in patterns for path in sorted(self.root.glob(f"dev/{pattern}"))]

    @property
    def in_container(self) -> bool:
        files = (".dockerenv", "run/.containerenv")
        variables = {"container", "KUBERNETES_SERVICE_HOST"}
        return bool(variables & set(self.environment)) or any(os.path.exists(self.root / name) for name in files)

    @property
    def distribution(self) -> str:
        """ID and ID_LIKE of /etc/os-release."""
        text = read_small(self.root / "etc/os-release")
        return " ".join(re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', text, re.MULTILINE))

    def vulkan_drivers(self) -> list[VulkanDriver]:
        """Return the registered drivers in the loader's order, without missing files."""
        paths = [self.root / path.lstrip("/") for path in driver_files(self.environment, self.root)]
        there = [path for path in paths if os.path.exists(path)]
        return [self._driver(path) for path in there if not _OTHER_BITS.search(path.name)]

    def _driver(self, path: Path) -> VulkanDriver:
        try:
            library = str(json.loads(read_small(path))["ICD"]["library_path"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return VulkanDriver(path, "", False)
        if library.startswith("."):
            library = str(path.parent / library)
        return VulkanDriver(path, library, self.loads(library))

    def nvidia_versions(self) -> tuple[str, list[str]]:
        """Return the version of NVIDIA's kernel module ("": it is not loaded), and those of its libraries."""
        module = re.search(r"Kernel Module\D*?([\d.]+\d)  ", read_small(self.root / "proc/driver/nvidia/version"))
        folders = ("usr/lib64", "usr/lib/*-linux-gnu", "usr/lib")
        files = [path.name for folder in folders for path in self.root.glob(f"{folder}/libnvidia-glcore.so.*")]
        return module[1] if module else "", sorted({name.partition(".so.")[2] for name in files})


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(
        system=platform.system(),
        environment=dict(os.environ),
        devices=list_devices(),
        loads=_loads,
        imports=_imports,
        permitted=lambda path: os.access(path, os.R_OK | os.W_OK),
        idle_units=left_idle(select_device("auto")),
        kernel=platform.release(),
    )


def _imports(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # a plain folder of that name has no origin


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
    return True
