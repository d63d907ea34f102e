"""Files, device nodes and drivers that a GPU needs. Read here, judged in diagnosis.py."""

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

LOADER = "libvulkan.so.1"
VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}  # PCI
_ICD_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # the loader takes the first that is set
_ICD_FOLDERS = ("etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d", "usr/share/vulkan/icd.d")
_MEMORY = 0x200  # IORESOURCE_MEM, of a window in /sys/bus/pci/devices/*/resource
_OTHER_BITS = re.compile(r"i[3-6]86|armhf")  # drivers of 32 bits, which this process does not load


@dataclass(frozen=True)
class VulkanDriver:
    """A file that registers a driver with Vulkan's loader. library: what it names, "" where it cannot be read; opens:
    whether that can be loaded."""

    file: Path
    library: str
    opens: bool

    @property
    def vendor(self) -> str:
        """Whose cards it is for, by the name that the file has everywhere."""
        name = self.file.name.lower()
        marks = {"nvidia": "NVIDIA", "radeon": "AMD", "amd": "AMD", "intel": "Intel"}
        return next((vendor for mark, vendor in marks.items() if mark in name), "")


@dataclass(frozen=True)
class Machine:
    """devices: as `list_devices` has them. loads: whether the linker finds a library by a name or path; imports:
    whether a Python package is there; permitted: whether a file may be read and written. idle_units: what there is to
    say of tensor cores. root: where the file system begins, which tests have elsewhere. kernel: its version."""

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
        """Those that wgpu can use, software drivers too."""
        return [d for d in self.devices if str(d["spec"]).startswith("wgpu:") and d.get("usable", True)]

    @property
    def cards(self) -> list[Mapping[str, Any]]:
        return [adapter for adapter in self.adapters if adapter["type"] != "CPU"]

    def pci_vendors(self) -> list[str]:
        """Makers of the graphics cards in the machine, whether or not a driver knows them. Linux."""
        found = set()
        for folder in sorted(self.root.glob("sys/bus/pci/devices/*")):
            if _read(folder / "class").startswith("0x03"):  # display controllers
                found.add(VENDORS.get(int(_read(folder / "vendor") or "0", 16), ""))
        return sorted(found - {""})

    def bar_bytes(self, vendor_id: int) -> int | None:
        """Largest window of memory that a GPU of the maker shows the processor, the smallest of several GPUs. Linux;
        None where it is not known."""
        found = []
        for folder in self.root.glob("sys/bus/pci/devices/*"):
            if _read(folder / "class").startswith("0x03") and int(_read(folder / "vendor") or "0", 16) == vendor_id:
                windows = re.findall(r"^(0x\w+) (0x\w+) (0x\w+)$", _read(folder / "resource"), re.MULTILINE)
                sizes = [int(end, 16) - int(start, 16) + 1 for start, end, flags in windows if int(flags, 16) & _MEMORY]
                found += [max(sizes)] if sizes else []
        return min(found, default=None)

    def nodes(self, *patterns: str) -> list[Path]:
        """Device nodes: paths below /dev."""
        return [path for pattern in patterns for path in sorted(self.root.glob(f"dev/{pattern}"))]

    @property
    def in_container(self) -> bool:
        files = (".dockerenv", "run/.containerenv")
        variables = {"container", "KUBERNETES_SERVICE_HOST"}
        return bool(variables & set(self.environment)) or any((self.root / name).exists() for name in files)

    @property
    def distribution(self) -> str:
        """ID and ID_LIKE of /etc/os-release."""
        text = _read(self.root / "etc/os-release")
        return " ".join(re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', text, re.MULTILINE))

    def named_drivers(self) -> tuple[str, list[str]]:
        """The environment variable that names the files of drivers, and these; "" and [] where none is set."""
        variable = next((name for name in _ICD_VARIABLES if self.environment.get(name)), "")
        return variable, [p for p in self.environment.get(variable, "").split(os.pathsep) if p]

    def vulkan_drivers(self) -> list[VulkanDriver]:
        """Return the registered drivers in the loader's order; files that are not there are left out."""
        variable, named = self.named_drivers()
        folders = [self.root / folder for folder in _ICD_FOLDERS]
        data = self.environment.get("XDG_DATA_HOME") or os.path.join(self.environment.get("HOME", ""), ".local/share")
        folders.append(self.root / data.lstrip("/") / "vulkan/icd.d")
        paths = (
            [self.root / p.lstrip("/") for p in named] if variable else [f for d in folders for f in d.glob("*.json")]
        )
        return [self._driver(path) for path in sorted(paths) if path.exists() and not _OTHER_BITS.search(path.name)]

    def _driver(self, path: Path) -> VulkanDriver:
        try:
            library = str(json.loads(_read(path))["ICD"]["library_path"])
        except (ValueError, KeyError, TypeError):
            return VulkanDriver(path, "", False)
        if library.startswith("."):
            library = str(path.parent / library)
        return VulkanDriver(path, library, self.loads(library))

    def nvidia_versions(self) -> tuple[str, list[str]]:
        """Version of NVIDIA's kernel module, "" where it is not loaded, and of its libraries."""
        module = re.search(r"Kernel Module\D*?([\d.]+\d)  ", _read(self.root / "proc/driver/nvidia/version"))
        folders = ("usr/lib64", "usr/lib/*-linux-gnu", "usr/lib")
        files = [path.name for folder in folders for path in self.root.glob(f"{folder}/libnvidia-glcore.so.*")]
        return module[1] if module else "", sorted({name.partition(".so.")[2] for name in files})


def _read(path: Path) -> str:
    """The text of a small file, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def this_machine() -> Machine:
    """The one that this process runs on."""
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
    return found is not None and found.origin is not None  # a mere folder of that name has none


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
