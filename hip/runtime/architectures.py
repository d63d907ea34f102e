"""AMD architectures: which are supported, which have code objects in the package, and what a code object is for."""

from __future__ import annotations

import re
from typing import Protocol

from wgrad.device.errors import DeviceError

SHIPPED = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# Architectures that run another one's machine code, renamed in the ELF header and the metadata. gfx1200's code equals
# gfx1201's byte for byte. gfx1100's works around every gfx11 erratum that clang knows, as its gfx11-generic does, and
# its work-groups fit the smaller register files of the others.
TWINS = {
    **dict.fromkeys(("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"), "gfx1100"),
    "gfx1200": "gfx1201",
}
# Generic targets, which a ROCm that knows code object version 6 loads on every GPU of a generation, and the
# architecture whose machine code theirs is, byte for byte, under a header of their own (build.py).
GENERIC = {"gfx11-generic": "gfx1100", "gfx12-generic": "gfx1201"}
# Lower byte of e_flags in the ELF header of a code object. Source: LLVM, User Guide for AMDGPU Backend, "ELF Header".
_MACHINE = {
    0x2C: "gfx900", 0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909", 0x32: "gfx90c",
    0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031", 0x38: "gfx1032",
    0x39: "gfx1033", 0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x41: "gfx1100", 0x42: "gfx1013",
    0x43: "gfx1150", 0x44: "gfx1103", 0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200",
    0x4A: "gfx1151", 0x4C: "gfx942", 0x4E: "gfx1201", 0x4F: "gfx950", 0x54: "gfx11-generic", 0x55: "gfx1152",
    0x58: "gfx1153", 0x59: "gfx12-generic",
}  # fmt: skip
_EM_AMDGPU = 224
_UNITS_OF_A_DIE = {"gfx942": 38, "gfx950": 32}  # MI300X: 304 compute units on 8 dies; MI300A: 228 on 6; MI355X: 256
# Those with the matrix instructions of CDNA2, 3 and 4, RDNA3 and RDNA4; gfx117x and gfx125x have others.
SUPPORTED = {
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152",
    "gfx1153", "gfx1200", "gfx1201",
}  # fmt: skip


class Gpu(Protocol):
    """Properties of a GPU, as its driver reports them."""

    architecture: str
    compute_units: int


def is_rdna(architecture: str) -> bool:
    """Return whether an architecture has work-group processors: gfx10, gfx11 and gfx12."""
    return re.fullmatch(r"gfx1[0-2][0-9a-f]{2}", architecture) is not None


def check_supported(architecture: str, gpu: str) -> None:
    """Check that a GPU has the matrix instructions of the kernels: CDNA2 and later, RDNA3 and RDNA4.

    Raises:
        DeviceError: The architecture is another one.
    """
    if architecture not in SUPPORTED:
        raise DeviceError(
            f"{gpu} has architecture {architecture or '(unnamed)'}, which is not supported: it lacks the matrix"
            " instructions of the HIP kernels (gfx90a, gfx942, gfx950, RDNA3, RDNA4); --device wgpu runs on it"
        )


def generic(architecture: str) -> str:
    """Return the generic target of an architecture that has no objects of its own, empty where there is none."""
    return next((name for name, twin in GENERIC.items() if twin == TWINS.get(architecture)), "")


def dies(gpu: Gpu) -> int:
    """Return the number of dies, which take a launch's work-groups in turn. Source: AMD, CDNA3 and 4 white papers."""
    return max(1, gpu.compute_units // _UNITS_OF_A_DIE.get(gpu.architecture, gpu.compute_units))


def check_image(image: bytes, where: str, architecture: str, gpu: str) -> None:
    """Check that `image` is a code object for this GPU; the driver's own error would name neither.

    Raises:
        DeviceError: It is no ELF file, is cut off, or is for another architecture; the message names all three.
    """
    if len(image) < 64 or image[:4] != b"\x7fELF":
        raise DeviceError(f"the code object {where} is damaged ({len(image):,} bytes, no ELF file); {_AGAIN}")
    machine = int.from_bytes(image[18:20], "little")
    sections, size, count = (int.from_bytes(image[at : at + n], "little") for at, n in ((40, 8), (58, 2), (60, 2)))
    if sections + size * count > len(image):
        raise DeviceError(f"the code object {where} is cut off at {len(image):,} bytes; {_AGAIN}")
    made_for = image[48]
    fits = _MACHINE.get(made_for, "unknown") in (architecture, generic(architecture))
    if machine == _EM_AMDGPU and not fits and architecture in _MACHINE.values():
        raise DeviceError(
            f"the code object {where} is for {_MACHINE.get(made_for, f'machine {made_for:#x}')}, and this GPU is"
            f" {gpu} ({architecture}); {_AGAIN}"
        )


def renamed(image: bytes, architecture: str) -> bytes:
    """Return the code object of an architecture's twin (TWINS), renamed to the architecture.

    Raises:
        DeviceError: It is not one.
    """
    twin = TWINS[architecture]
    old, new = (f"amdgcn-amd-amdhsa--{name}".encode() for name in (twin, architecture))
    if len(image) < 64 or _MACHINE.get(image[48]) != twin or image.count(old) != 1:
        raise DeviceError(f"the code object for {twin} is damaged, which {architecture} uses too; {_AGAIN}")
    (machine,) = (number for number, name in _MACHINE.items() if name == architecture)
    return (image[:48] + bytes([machine]) + image[49:]).replace(old, new)


_AGAIN = "build it again with `python -m wgrad.hip.runtime.build`, or install wgrad again"
