"""The calls of hip-python that wgrad.hip makes, on guarded host memory; launches go to the executor."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.hip.executor.call import segment
from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.isa import access
from tests.hip.executor.memory import Guarded
from tests.hip.executor.waves import Grid, Launch, Order, run
from wgrad.device.errors import DeviceError


@dataclass
class Execution:
    """The instructions executed since it was last cleared."""

    kernels: list[str] = field(default_factory=list)
    # By kernel: ("load", bits): how many accesses to global memory waves made.
    accesses: dict[str, Counter[tuple[str, int]]] = field(default_factory=lambda: defaultdict(Counter))


class Memory:
    """Guarded host memory by address."""

    def __init__(self) -> None:
        self._held: dict[int, Guarded] = {}

    def allocate(self, nbytes: int) -> int:
        made = Guarded(nbytes, fill=0xFF)  # NaN in every floating-point type
        self._held[made.address] = made
        return made.address

    def free(self, address: int) -> None:
        made = self._held.pop(address)
        self._verify(made)
        made.free()

    def verify(self) -> None:
        """Raise DeviceError if bytes next to an array were written."""
        for made in self._held.values():
            self._verify(made)

    def _verify(self, made: Guarded) -> None:
        if not made.untouched():
            raise DeviceError(f"bytes just outside of an array of {made.nbytes:,} bytes were written")

    def around(self, address: int) -> str:
        for made in self._held.values():
            if made.holds(address):
                return f"{address - made.address:+d} bytes from the start of an array of {made.nbytes:,} bytes"
        return "not near any array"


class Binding:
    """Stands in for hip-python's `hip`. order: which wave runs first."""

    hipMemcpyKind = hipStreamCaptureMode = staticmethod(int)

    def __init__(self, architecture: str, lanes: int) -> None:
        self.architecture, self.lanes = architecture, lanes
        self.order: Order = "fwd"
        self.memory = Memory()
        self.execution = Execution()
        self._recorded: list[tuple[Any, ...]] | None = None

    def hipGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def hipSetDevice(self, index: int) -> tuple[int]:
        return (0,)

    def hipDriverGetVersion(self) -> tuple[int, int]:
        return 0, 0

    def hipGetDeviceProperties(self, index: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(
            gcnArchName=self.architecture, warpSize=self.lanes, multiProcessorCount=4, name="executed code objects",
            sharedMemPerBlock=65536, totalGlobalMem=1 << 36,
        )  # fmt: skip

    def hipStreamCreate(self) -> tuple[int, int]:
        return 0, 0

    def hipStreamSynchronize(self, stream: Any) -> tuple[int]:
        return (0,)

    def hipStreamQuery(self, stream: Any) -> tuple[int]:
        return (0,)

    def hipMalloc(self, nbytes: int) -> tuple[int, int]:
        return 0, self.memory.allocate(nbytes)

    def hipFree(self, address: int) -> tuple[int]:
        self.memory.free(address)
        return (0,)

    def hipHostMalloc(self, nbytes: int, flags: int) -> tuple[int, int]:
        return self.hipMalloc(nbytes)

    def hipHostFree(self, address: int) -> tuple[int]:
        return self.hipFree(address)

    def hipMemcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: Any) -> tuple[int]:
        if self._recorded is None:
            ctypes.memmove(to, source, nbytes)
        else:
            self._recorded.append((to, source, nbytes))
        return (0,)

    def hipModuleLaunchKernel(self, kernel: Any, *launch: Any) -> tuple[int]:
        gx, gy, gz, threads, _, _, _, _, parameters, _ = launch
        made = kernel, (gx, gy, gz), threads, _packed(kernel, ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p)))
        if self._recorded is None:
            self._execute(*made)
        else:
            self._recorded.append(made)
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
        for made in graph:
            if len(made) == 3:  # a copy
                ctypes.memmove(*made)
            else:
                self._execute(*made)
        return (0,)

    def _execute(self, kernel: Any, grid: Grid, threads: int, packed: bytes) -> None:
        self.execution.kernels.append(kernel.name)
        before = kernel.executed()
        try:
            arguments = segment(kernel, packed, grid, threads)
            run(Launch(kernel, grid, threads, arguments.address, self.memory.around), self.order)
        except ExecutorError as error:
            raise DeviceError(str(error)) from error
        arguments.free()
        self.memory.verify()
        for name, count in (kernel.executed() - before).items():
            if found := access(name):
                self.execution.accesses[kernel.name][found] += count


def _packed(kernel: Any, pointers: Any) -> bytes:
    """The arguments as HIP copies them, by what the kernel declares. The list is closed as runtime.Layout does.

    Raises:
        DeviceError: there are more or fewer, or one of another size.
    """
    declared = [a for a in kernel.metadata.get(".args", []) if not a[".value_kind"].startswith("hidden_")]
    first, packed = pointers[0] or 0, b""
    for number, about in enumerate(declared):
        packed += bytes(about[".offset"] - len(packed))
        if pointers[number] != first + len(packed):
            raise DeviceError(f"{kernel.name}: argument {number} is not where the kernel's layout has it")
        packed += ctypes.string_at(pointers[number], about[".size"])
    if pointers[len(declared)] != first + len(packed):
        raise DeviceError(f"{kernel.name}: other arguments than the {len(packed)} bytes that the kernel declares")
    return packed
