"""A HIP device whose kernels are the compiled code objects, executed instruction by instruction on the CPU.

`ExecutedDevice` is `wgrad.hip.device.HipDevice` over a small stand-in for hip-python: hipMalloc gives guarded host
memory, hipModuleLaunchKernel hands the packed arguments, byte for byte, to run_hsaco.py (named by $WGRAD_RUN_HSACO; it
needs $TINYGRAD_DIR). So the launch code, the code objects of `wgrad.hip.runtime.build` and the operators are tested
together.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hip_executor_lds
import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.hip.device import HipDevice
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.build import compile_source
from wgrad.hip.runtime.compile import KERNELS, Modules

ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")
WAVE = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
NEEDS = "$WGRAD_RUN_HSACO names run_hsaco.py and $TINYGRAD_DIR a checkout of tinygrad"
# The executor takes a 16-bit source or result above v127 for the upper half of a register 128 lower, on CDNA too.
HIGH_HALF = re.compile(
    r"v_cvt_(f16_\w+_e32 v(12[89]|1[3-9]\d|2\d\d)\b|[fiu]\d+_f16_e32 v\d+, v(12[89]|1[3-9]\d|2\d\d)\b)"
)


def available() -> bool:
    """Are the tools named by the environment?"""
    return bool(os.environ.get("WGRAD_RUN_HSACO")) and "TINYGRAD_DIR" in os.environ


def tool(name: str = "run_hsaco") -> Any:
    """run_hsaco.py, or a module beside it.

    Raises:
        DeviceError: the environment does not name it.
    """
    if not available():
        raise DeviceError(f"no executor: {NEEDS}")
    folder = str(Path(os.environ["WGRAD_RUN_HSACO"]).resolve().parent)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def code_object(source: str, architecture: str, folder: Path) -> Path:
    """The code object of hip/<source>.hip under `folder`, made where it is missing or older than the sources."""
    path = folder / architecture / f"{source}.co"
    newest = max(p.stat().st_mtime for p in (KERNELS / f"{source}.hip", *KERNELS.glob("*.hpp")))
    if not path.exists() or path.stat().st_mtime < newest:
        compile_source(KERNELS / f"{source}.hip", architecture, path)
    return path


class Unsupported(DeviceError):
    """A kernel that the executor is known to run wrongly; the message says why."""

    def __init__(self, kernel: str, why: str) -> None:
        super().__init__(f"{kernel}: {why}")
        self.kernel = kernel


@dataclass
class Execution:
    """What was executed since it was last cleared."""

    kernels: list[str] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    instructions: int = 0
    # Executed by kernel: "load 128": n; only where `Binding.count_accesses` is set.
    accesses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class ExecutedModules(Modules):
    """Kernels of run_hsaco.py by name."""

    def __init__(self, architecture: str, folder: Path) -> None:
        super().__init__(architecture)
        self._folder = folder

    def get(self, source: str, kernel: str) -> Any:
        if (source, kernel) not in self._functions:
            path = code_object(source, self.architecture, self._folder)
            made = self._functions[source, kernel] = tool().Kernel(str(path), kernel, self.architecture)
            hip_executor_lds.install(made)
            self.compiled += 1
        return self._functions[source, kernel]


class Memory:
    """Guarded host memory by address."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        made = tool().Guarded(nbytes, fill=0xFF)  # NaN in every floating-point type
        self._held[made.addr] = made
        return int(made.addr)

    def free(self, address: int) -> None:
        made = self._held.pop(address)
        self._verify(made)
        made.free()

    def verify(self) -> None:
        """Raises DeviceError where the bytes beside an array were written."""
        for made in self._held.values():
            self._verify(made)

    def _verify(self, made: Any) -> None:
        if not made.check():
            raise DeviceError(f"bytes just outside of an array of {made.n:,} bytes were written")

    def around(self, address: int) -> str:
        for start, made in self._held.items():
            if made.map <= address < made.map + made.total:
                return f"{address - start:+d} bytes from the start of an array of {made.n:,} bytes"
        return "not near any array"


class Binding:
    """The calls of hip-python that Runtime makes."""

    hipMemcpyKind = hipStreamCaptureMode = staticmethod(int)

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.order = "fwd"
        self.count_accesses = False
        self.memory = Memory()
        self.execution = Execution()
        self._recorded: list[tuple[Any, ...]] | None = None

    def hipSetDevice(self, index: int) -> tuple[int]:
        return (0,)

    def hipGetDeviceProperties(self, index: int) -> tuple[int, Any]:
        wave = WAVE[self.architecture]
        return 0, SimpleNamespace(
            gcnArchName=self.architecture, warpSize=wave, multiProcessorCount=4, name="executed code objects",
            sharedMemPerBlock=65536,
        )  # fmt: skip

    def hipStreamCreate(self) -> tuple[int, int]:
        return 0, 0

    def hipStreamSynchronize(self, stream: Any) -> tuple[int]:
        return (0,)

    def hipMalloc(self, nbytes: int) -> tuple[int, int]:
        return 0, self.memory.allocate(nbytes)

    def hipFree(self, address: int) -> tuple[int]:
        self.memory.free(address)
        return (0,)

    def hipMemcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: Any) -> tuple[int]:
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def hipModuleLaunchKernel(self, kernel: Any, *call: Any) -> tuple[int]:
        gx, gy, gz, threads, _, _, _, _, _, extra = call
        pointers = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        size = ctypes.c_size_t.from_address(pointers[3]).value
        launch = (kernel, (gx, gy, gz), threads, ctypes.string_at(pointers[1], size))
        if self._recorded is not None:
            self._recorded.append(launch)
        else:
            self._execute(*launch)
        return (0,)

    def hipStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[int]:
        self._recorded = []
        return (0,)

    def hipStreamEndCapture(self, stream: Any) -> tuple[int, Any]:
        recorded, self._recorded = self._recorded, None
        return 0, recorded

    def hipGraphInstantiateWithFlags(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, graph

    def hipGraphDestroy(self, graph: Any) -> tuple[int]:
        return (0,)

    hipGraphExecDestroy = hipGraphDestroy

    def hipGraphLaunch(self, graph: Any, stream: Any) -> tuple[int]:
        for launch in graph:
            self._execute(*launch)
        return (0,)

    def _execute(self, kernel: Any, grid: tuple[int, int, int], threads: int, packed: bytes) -> None:
        if kernel.ws == 64 and any(HIGH_HALF.match(text) for text, _ in kernel.listing.values()):
            raise Unsupported(kernel.name, "float16 conversions above v127, which the executor reads as on RDNA3")
        kernel.kernarg = lambda _, grid, block: (segment(kernel, packed, grid, block), [])
        try:
            kernel.run(grid, (threads, 1, 1), [], order=self.order)
        except tool().EmuError as error:
            found = re.search(r"fault at address (0x[0-9a-f]+)", str(error))
            near = f" ({self.memory.around(int(found[1], 16))})" if found else ""
            raise DeviceError(f"{error}{near}") from error
        self.memory.verify()
        self.execution.kernels.append(kernel.name)
        self.execution.warnings.update(f"{kernel.name}: {w}" for w in kernel.warnings)
        self.execution.instructions += kernel.info["instructions"]
        if self.count_accesses:
            self._count(kernel)

    def _count(self, kernel: Any) -> None:
        width = tool("isa_report").width
        for mnemonic, count in kernel.dynamic_mix().items():
            if found := re.match(r"(?:global|buffer|flat)_(load|store)", mnemonic):
                self.execution.accesses[kernel.name][f"{found[1]} {width(mnemonic)}"] += count


def segment(kernel: Any, packed: bytes, grid: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """The kernel's argument segment: the packed arguments as HIP copies them, and the hidden ones.

    Raises:
        DeviceError: the packed arguments end before or behind the last one that the kernel declares.
    """
    declared = kernel.meta.get(".args", [])
    end = max(a[".offset"] + a[".size"] for a in declared if not a[".value_kind"].startswith("hidden_"))
    if len(packed) != end:
        raise DeviceError(f"{kernel.name}: {len(packed)} bytes of arguments, the kernel declares {end}")
    size = max(kernel.meta.get(".kernarg_segment_size", 0), kernel.kd["kernarg"], 16)
    made = tool().Guarded(size, align=16)
    raw = (ctypes.c_char * size).from_address(made.addr)
    raw[: len(packed)] = packed
    hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid)}
    hidden |= {f"hidden_group_size_{axis}": n for axis, n in zip("xyz", block)}
    for a in declared:
        if a[".value_kind"] in hidden:
            kind = {2: "<H", 4: "<I"}[a[".size"]]
            struct.pack_into(kind, raw, a[".offset"], hidden[a[".value_kind"]])
    return made


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


class ExecutedDevice(HipDevice):
    """Every operator, on the machine code of one architecture. Memory that was not written reads as NaN.

    folder: where code objects are kept. order: "fwd" or "rev", which wave runs first between barriers.
    """

    def __init__(self, architecture: str, folder: Path, order: str = "fwd") -> None:
        fake = Binding(architecture)
        with _stand_in(fake):
            super().__init__(exact_blocks=True)
        self.modules = ExecutedModules(architecture, folder)
        self.order = order

    @property
    def order(self) -> str:
        return str(self._hip.order)

    @order.setter
    def order(self, value: str) -> None:
        self._hip.order = value

    @property
    def execution(self) -> Execution:
        """Kernels, warnings and instructions so far."""
        found: Execution = self._hip.execution
        return found

    def count_accesses(self) -> None:
        """From now on `execution.accesses` counts accesses to global memory by width."""
        self._hip.count_accesses = True

    def kernels(self) -> list[tuple[str, str]]:
        """Every kernel of the sources that were used so far, with its source's name."""
        folder = self.modules._folder
        sources = sorted({source for source, _ in self.modules._functions})
        found = [(s, tool().CodeObject(str(code_object(s, self.architecture, folder)))) for s in sources]
        return [(kernel, source) for source, code in found for kernel in code.kernels]

    def forget(self) -> None:
        self._hip.execution = Execution()

    def empty(self, shape: Any, dtype: Any = np.float32) -> Any:
        array = super().empty(shape, dtype)
        if self._replay is None:  # a block that was used before
            ctypes.memset(array.address, 0xFF, array.lease.block.nbytes)
        return array
