"""Reasons why a machine cannot compute on its GPU, and what to do: `wgrad doctor`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from wgrad.autograd.driver_faults import AMD, Fault, known_faults
from wgrad.autograd.machine import LOADER, Machine
from wgrad.wgsl.runtime.vulkan_drivers import named_files

OLDEST_MESA = (22, 3)  # oldest version that was tried
# Commands that install packages, and names of packages, by the distribution's ID.
_INSTALL = {
    "debian": "apt-get install",
    "ubuntu": "apt-get install",
    "fedora": "dnf install",
    "rhel": "dnf install",
    "suse": "zypper install",
    "arch": "pacman -S",
    "alpine": "apk add",
}
_LOADER_PACKAGE = {
    "fedora": "vulkan-loader",
    "rhel": "vulkan-loader",
    "arch": "vulkan-icd-loader",
    "alpine": "vulkan-loader",
}
_MESA_PACKAGE = {"arch": "vulkan-radeon vulkan-intel", "alpine": "mesa-vulkan-ati mesa-vulkan-intel"}
_NVIDIA = (
    "install NVIDIA's driver with its Vulkan part (Ubuntu: ubuntu-drivers install; others: the package nvidia-driver)"
)


def findings(machine: Machine) -> list[str]:
    """Return a line for each problem, which ends in what to do."""
    found = [*_library(machine), *_crashes(machine)]
    if machine.system == "Linux":
        if not machine.cards and not found:
            found += _container(machine) or _loader(machine) or _registered(machine) or _vendors(machine)
        found += _permissions(machine)
    if not found and not machine.cards:
        found += _no_card(machine)
    found += [*_age(machine), *_float16(machine), *_reported(machine), *_hip(machine)]
    return [*found, machine.idle_units] if machine.idle_units else found


def _crashes(machine: Machine) -> list[str]:
    return [
        f"{d['name']} {d['crash']}: {_of_crash(machine, str(d['name'])) or 'update its driver, or remove it'}"
        for d in machine.devices
        if "crash" in d
    ]


def _of_crash(machine: Machine, driver: str) -> str:
    """Return the text of a known crash that this may be, by the name of the driver or adapter; "": none."""
    if "amd" not in driver.lower() and "radeon" not in driver.lower():
        return ""
    known = {"vendor_id": AMD, "backend": "Vulkan", "type": "IntegratedGPU"}
    return next((f.text for f in known_faults(known, machine.system) if f.kind == "crash"), "")


def _faults(machine: Machine) -> Iterator[tuple[Mapping[str, Any], Fault]]:
    """Yield the known faults of the adapters, each once."""
    seen = set[tuple[str, str]]()
    for adapter in machine.cards:
        known = {**adapter, "bar_bytes": machine.bar_bytes(adapter.get("vendor_id", 0))}
        for fault in known_faults(known, machine.system, machine.kernel):
            if (str(adapter["name"]), fault.seen) not in seen:
                seen.add((str(adapter["name"]), fault.seen))
                yield adapter, fault


def _reported(machine: Machine) -> Iterator[str]:
    for adapter, fault in _faults(machine):
        if fault.kind != "note":
            yield f"{adapter['name']}: {fault.text}"


def notes(machine: Machine) -> list[str]:
    """Return a line for each fact about the GPUs that cannot be changed."""
    return [f"{adapter['name']}: {fault.text}" for adapter, fault in _faults(machine) if fault.kind == "note"]


def _install(machine: Machine, packages: dict[str, str], usual: str) -> str:
    known = next((name for name in _INSTALL if name in machine.distribution.split()), "")
    if not known:
        return f"install {usual}"
    return f"{_INSTALL[known]} {packages.get(known, usual)}"


def _container(machine: Machine) -> list[str]:
    """Return the finding that a container was started without the GPU, which hides all other problems."""
    if not machine.in_container:
        return []
    vendors = machine.pci_vendors()
    if machine.nodes("nvidia[0-9]*"):
        given = machine.environment.get("NVIDIA_DRIVER_CAPABILITIES", "")
        if given and not {"all", "graphics"} & set(given.split(",")):
            return [
                f"NVIDIA_DRIVER_CAPABILITIES is {given}, so this container has CUDA and no Vulkan: start it with -e "
                "NVIDIA_DRIVER_CAPABILITIES=all"
            ]
        return []
    if machine.nodes("dri/renderD*", "kfd", "dxg"):
        return []
    nvidia = "--gpus all -e NVIDIA_DRIVER_CAPABILITIES=all"
    others = "--device /dev/dri (and --device /dev/kfd for HIP)"
    if "NVIDIA" in vendors:
        how = nvidia
    elif vendors:
        how = others
    else:
        how = f"{nvidia} for NVIDIA, {others} for AMD and Intel"
    there = f"the machine has one of {' and '.join(vendors)}" if vendors else "if the machine has one"
    return [f"this is a container without a GPU: {there}: start the container with {how}"]


def _loader(machine: Machine) -> list[str]:
    if machine.loads(LOADER):
        return []
    how = _install(machine, _LOADER_PACKAGE, "libvulkan1")
    return [f"there is no Vulkan loader ({LOADER}), through which every GPU is reached: {how}"]


def _registered(machine: Machine) -> list[str]:
    """Return findings about files that register drivers which do not exist."""
    variable, named = named_files(machine.environment)
    found = [
        f"{variable} names {path}, which is not there, and hides all other drivers: unset {variable}"
        for path in named
        if not os.path.exists(machine.root / path.lstrip("/"))
    ]
    for driver in machine.vulkan_drivers():
        name = "/" + driver.file.relative_to(machine.root).as_posix()
        if not driver.library:
            found.append(f"{name} names no library of a Vulkan driver: install the driver again, or delete the file")
        elif not driver.opens:
            found.append(
                f"{name} names {driver.library}, which is not there or cannot be loaded: install the driver again, or "
                "delete the file"
            )
    return found


def _vendors(machine: Machine) -> list[str]:
    """Return findings about GPUs in the machine for which no driver offers an adapter."""
    drivers = machine.vulkan_drivers()
    module, libraries = machine.nvidia_versions()
    found = []
    for vendor in machine.pci_vendors():
        registered = [driver for driver in drivers if driver.vendor == vendor]
        if vendor == "NVIDIA" and module and libraries and module not in libraries:
            found.append(
                f"NVIDIA's kernel module is {module} and its libraries are {', '.join(libraries)}, as after an update: "
                "restart the machine"
            )
        elif not registered:
            how = _NVIDIA if vendor == "NVIDIA" else _install(machine, _MESA_PACKAGE, "mesa-vulkan-drivers")
            found.append(f"there is a GPU of {vendor} and no Vulkan driver for it: {how}")
        elif not _refused(machine):
            found.append(
                f"there is a GPU of {vendor} and a Vulkan driver, which gives no adapter: it is too old for the GPU "
                "or for wgpu, or half updated: update it and restart (vulkaninfo --summary tells more)"
            )
    return found


def _refused(machine: Machine) -> list[str]:
    """Return the device nodes that this user may not open."""
    return [str(path) for path in machine.nodes("dri/renderD*", "kfd") if not machine.permitted(path)]


def _permissions(machine: Machine) -> Iterator[str]:
    refused = ["/" + path.removeprefix(str(machine.root)).lstrip("/") for path in _refused(machine)]
    if refused:
        how = (
            "start the container with --group-add and the number of the group that the files have (ls -ln)"
            if machine.in_container
            else "sudo usermod -aG render,video $USER, then log in again"
        )
        yield f"you may not open {' and '.join(refused)}: {how}"


def _library(machine: Machine) -> Iterator[str]:
    for device in machine.devices:
        if device["spec"] == "wgpu" and not device.get("usable", True) and "crash" not in device:
            yield f"wgpu does not work: {str(device['reason']).removeprefix('not usable: ')}"


def _no_card(machine: Machine) -> Iterator[str]:
    if machine.adapters:
        software = machine.adapters[0]["name"]
        yield (
            f"only a software driver was found ({software}): if there is a GPU, install its driver; in a virtual "
            "machine, pass the GPU through to it"
        )
    elif machine.system == "Linux":
        how = _install(machine, {}, "mesa-vulkan-drivers")
        yield f"no GPU was found: if there is one of AMD or Intel, {how}; if of NVIDIA, {_NVIDIA}"
    else:
        yield "wgpu finds no adapter: install the GPU's driver from its maker"


def _age(machine: Machine) -> Iterator[str]:
    for adapter in machine.cards:
        version = re.search(r"Mesa (\d+)\.(\d+)", str(adapter.get("driver", "")))
        if version and (int(version[1]), int(version[2])) < OLDEST_MESA:
            oldest = ".".join(map(str, OLDEST_MESA))
            yield f"{adapter['name']} has {version[0]}, older than any that was tried ({oldest}): update Mesa"


def _float16(machine: Machine) -> Iterator[str]:
    for adapter in machine.cards:
        known = any(f.lacking for f in known_faults(adapter, machine.system))  # reported there
        if "shader-f16" not in adapter.get("features", ()) and not known:
            yield (
                f"{adapter['name']} has no shader-f16 with {adapter.get('driver') or 'its driver'}, so that runs are "
                "in float32: a newer driver may have it, if the GPU can"
            )


def _hip(machine: Machine) -> Iterator[str]:
    """Yield findings about HIP, if AMD's kernel driver has found a GPU that can compute (/dev/kfd)."""
    if not machine.nodes("kfd") or _refused(machine):
        return
    if not machine.imports("hip") and not machine.imports("rocm"):
        yield "there is an AMD GPU, and hip-python is not installed, so that HIP is not used: pip install 'wgrad[hip]'"
        return
    found = [device for device in machine.devices if device["spec"].partition(":")[0] == "hip"]
    for device in found:
        if not any(other.get("usable", True) for other in found):
            yield f"HIP does not work: {str(device['reason']).removeprefix('not usable: ')}"
