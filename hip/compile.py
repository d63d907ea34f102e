"""Code objects by architecture: those that ship with the package, hiprtc's for other cards; loaded once a process.

Shipped: objects/<architecture>/<file>.co beside this file, made by `python -m wgrad.hip.build`; $WGRAD_HIP_OBJECTS
names another folder of the same shape. hiprtc's results are kept under $XDG_CACHE_HOME/wgrad/hip (~/.cache).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from wgrad.hip import binding
from wgrad.hip.errors import DeviceError

ROOM = Path(__file__).resolve().parent
SHIPPED = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
# Code objects for one of these run on the others too: same instructions, same registers.
COMPATIBLE = {"gfx1101": "gfx1100", "gfx1102": "gfx1100", "gfx1103": "gfx1100", "gfx1200": "gfx1201"}
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno")


def sources() -> list[Path]:
    """Every file of kernels."""
    return sorted(ROOM.glob("*.hip"))


def serves(source: Path, architecture: str) -> bool:
    """A file may name its architectures in its head (`// architectures: gfx942 gfx90a`); without that it serves all."""
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("// architectures:"):
            return architecture in line.partition(":")[2].split()
        if not line.startswith("//"):
            break
    return True


def objects_folder() -> Path:
    named = os.environ.get("WGRAD_HIP_OBJECTS")
    return Path(named) if named else ROOM / "objects"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "wgrad" / "hip"


class Modules:
    """The loaded code objects of one device and their kernels, by name."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.compiled = 0  # kernels looked up or compiled so far
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}

    def has(self, source: str) -> bool:
        """Is there a file of this name for this architecture (without loading it)?"""
        path = ROOM / f"{source}.hip"
        return path.exists() and serves(path, self.architecture)

    def get(self, source: str, kernel: str) -> Any:
        """The function `kernel` of `source`.hip.

        Raises:
            DeviceError: the file, its code object or the kernel is not there, or is for another architecture.
        """
        found = self._functions.get((source, kernel))
        if found is None:
            found = binding.check(
                binding.hip().hipModuleGetFunction(self._module(source), kernel.encode()),
                f"{source}.hip has no kernel '{kernel}' for {self.architecture}",
            )
            self._functions[source, kernel] = found
            self.compiled += 1
        return found

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            image, where = self._image(source)
            self._modules[source] = binding.check(
                binding.hip().hipModuleLoadData(image),
                f"the code object {where} cannot be loaded on {self.architecture}; make it again with"
                " `python -m wgrad.hip.build`",
            )
        return self._modules[source]

    def _image(self, source: str) -> tuple[bytes, str]:
        folder = objects_folder()
        for architecture in (self.architecture, COMPATIBLE.get(self.architecture, "")):
            path = folder / architecture / f"{source}.co"
            if architecture and path.is_file():
                return path.read_bytes(), str(path)
        if self.architecture in SHIPPED and "WGRAD_HIP_OBJECTS" in os.environ:
            path = folder / self.architecture / f"{source}.co"
            raise DeviceError(f"no code object {path}; $WGRAD_HIP_OBJECTS names this folder")
        return compile_with_hiprtc(source, self.architecture)


def compile_with_hiprtc(source: str, architecture: str) -> tuple[bytes, str]:
    """The code object of `source`.hip by ROCm's run-time compiler, from the cache when it was made before."""
    text = (ROOM / f"{source}.hip").read_text(encoding="utf-8")
    headers = {p.name: p.read_text(encoding="utf-8") for p in sorted(ROOM.glob("*.hpp")) if p.name != "gpu_host.hpp"}
    digest = hashlib.sha256("\0".join([text, architecture, *OPTIONS, *headers, *headers.values()]).encode()).hexdigest()
    path = _cache_folder() / f"{source}-{architecture}-{digest[:16]}.co"
    if path.is_file():
        return path.read_bytes(), str(path)
    image = _hiprtc(source, text, headers, [f"--offload-arch={architecture}", *OPTIONS])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(image)
    beside.replace(path)
    return image, str(path)


def _hiprtc(source: str, text: str, headers: dict[str, str], options: list[str]) -> bytes:
    rtc = binding.hiprtc()
    names = [n.encode() for n in headers]
    bodies = [b.encode() for b in headers.values()]
    try:
        program = binding.check(
            rtc.hiprtcCreateProgram(text.encode(), f"{source}.hip".encode(), len(names), bodies, names), "hiprtc"
        )
    except RuntimeError as error:
        raise DeviceError(
            f"there is no code object of {source}.hip for this card ({options[0]}), and hiprtc, which would make one,"
            f" does not work: {error}; ship one with `python -m wgrad.hip.build --arch <name>`"
        ) from error
    code = rtc.hiprtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    if int(code) != 0:
        log = bytearray(binding.check(rtc.hiprtcGetProgramLogSize(program), "hiprtc's log"))
        rtc.hiprtcGetProgramLog(program, log)
        raise DeviceError(f"hiprtc cannot compile {source}.hip ({options[0]}): {log.decode(errors='replace')[:4000]}")
    image = bytearray(binding.check(rtc.hiprtcGetCodeSize(program), "hiprtc's code size"))
    binding.check(rtc.hiprtcGetCode(program, image), "hiprtc's code")
    return bytes(image)
