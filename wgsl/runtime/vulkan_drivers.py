"""Vulkan drivers registered on this machine, and the key of a verdict on them. Loads no driver."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wgrad.device.files import names_in, read_small

VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # the loader takes the first that is set
_FOLDERS = (
    "/etc/vulkan/icd.d",
    "/usr/local/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
)
_PREFIXES = ("VK_", "WGPU_", "MESA_", "LVP_", "RADV_", "NVK_", "GALLIUM_", "DRI_", "LD_", "CUDA_", "__", "XDG_DATA_")
_ADAPTERS_KEY = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
_DRIVERS_KEY = r"SOFTWARE\Khronos\Vulkan\Drivers"


def named_files(environment: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """Return the variable that names the files that register drivers, and these; "" and []: none is set."""
    variable = next((name for name in VARIABLES if environment.get(name)), "")
    return variable, [path for path in environment.get(variable, "").split(os.pathsep) if path]


def driver_files(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """Return the paths of the files that register drivers, in the loader's order. root: of the file system."""
    variable, named = named_files(environment)
    if variable:
        return named
    if sys.platform == "win32":
        return [path for path, _ in _windows()]
    home = environment.get("HOME") or os.path.expanduser("~")
    data = [environment.get("XDG_DATA_HOME") or os.path.join(home, ".local/share")]
    data += (environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":")
    folders = [*(os.path.join(folder, "vulkan/icd.d") for folder in data if folder), *_FOLDERS]
    found = [os.path.join(folder, name) for folder in folders for name in sorted(names_in(root / folder.lstrip("/")))]
    return list(dict.fromkeys(path for path in found if path.endswith(".json")))


def state_of_drivers() -> list[Any]:
    """Return a state that changes with a driver, a device node, a variable that drivers read, or a process limit."""
    files = driver_files()
    found: list[Any] = [platform.platform(), platform.version(), _limits()]
    found.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(_PREFIXES)))
    found += [(path, *_stamp(path)) for path in files]
    found.append(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")) + sorted(names_in("/dev/dri")))
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        found.append(read_small(path))
    # A library that a file names by a path, or the C library's cache of those that it names by name alone.
    found += [_stamp(library) for path in files for library in _library(path)]
    found.append(_stamp("/etc/ld.so.cache"))
    return [*found, list(_windows())] if sys.platform == "win32" else found


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    except (OSError, ValueError):  # ValueError: a NUL in the path, which a driver's file may have
        return 0, 0


def _library(path: str) -> list[str]:
    words = read_small(path).split('"')
    return [word for before, word in zip(words, words[2:]) if before == "library_path" and "/" in word]


def _limits() -> list[tuple[int, int]]:
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return []
    return [resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_AS", "RLIMIT_DATA")]


def _windows() -> Iterator[tuple[str, str]]:
    """(file that registers a Vulkan driver, version of the adapter's driver or "")."""
    registry: Any = importlib.import_module("winreg")
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, _ADAPTERS_KEY) as adapters:
            for number in range(registry.QueryInfoKey(adapters)[0]):
                try:
                    with registry.OpenKey(adapters, registry.EnumKey(adapters, number)) as adapter:
                        named = registry.QueryValueEx(adapter, "VulkanDriverName")[0]
                        version = registry.QueryValueEx(adapter, "DriverVersion")[0]
                        yield from (
                            (str(path), str(version)) for path in ([named] if isinstance(named, str) else named)
                        )
                except OSError:
                    continue
    except OSError:
        pass
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, _DRIVERS_KEY) as drivers:
            for number in range(registry.QueryInfoKey(drivers)[1]):
                yield str(registry.EnumValue(drivers, number)[0]), ""
    except OSError:
        pass
