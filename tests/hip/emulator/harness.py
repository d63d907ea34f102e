"""The emulated GPU in this process: its library, devices on it, and what their kernels do in memory."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.hip.emulator.build import build_kernels, build_library
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest import probe as self_check
from wgrad.hip.runtime.compile import Modules
from wgrad.hip.runtime.objects import source_file


class Site(NamedTuple):
    """The accesses by one instruction; cost in LDS cycles or in cache lines (tests/hip/emulator/counts.cpp)."""

    offset: int  # of the instruction in the code object: llvm-symbolizer --obj=<the .co file> says which line it is
    memory: str  # lds, global
    direction: str  # load, store
    bytes: int  # of one lane
    accesses: int
    cost: int
    least: int
    fetched: int  # lines that L1 read from L2


class Counts:
    """The memory accesses of one kernel."""

    def __init__(self, launches: int, sites: list[list[Any]]) -> None:
        self.launches, self.sites = launches, [Site(*s) for s in sites]

    def total(self, memory: str, direction: str | None = None) -> tuple[int, int]:
        """(cost, least cost) of all accesses to "lds" or "global"."""
        chosen = [s for s in self.sites if s.memory == memory and direction in (None, s.direction)]
        return sum(s.cost for s in chosen), sum(s.least for s in chosen)

    @property
    def fetched(self) -> int:
        """Lines that L1 read from L2."""
        return sum(s.fetched for s in self.sites)


class Emulator:
    """The emulated libamdhip64.so in this process, and kernels built for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = build_library(folder)
        # hip-python opens the same one by its name. Not RTLD_GLOBAL: kernels have symbols of their own of these names.
        self.library = ctypes.CDLL(str(path))
        self.library.emulator_last_failure.restype = ctypes.c_char_p
        self.library.emulator_launches.restype = ctypes.c_ulong
        self.library.emulator_counts.restype = ctypes.c_char_p
        self.library.emulator_l1.argtypes = [ctypes.c_size_t]
        self._devices: dict[str, Any] = {}

    @property
    def last_failure(self) -> str:
        return self.library.emulator_last_failure().decode()

    def clear(self) -> None:
        """Forget an error that would stay, as on a GPU, for the rest of the process."""
        self.library.emulator_clear()

    def build(self, source: str, architecture: str) -> None:
        build_kernels(source_file(source), architecture, self.folder)

    def counting(self, architecture: str, more: Path | None = None, only: Collection[str] | None = None) -> Any:
        """A device whose kernels, and those of `more` (a folder of .hip files), count their memory accesses.

        Arrays start at multiples of 256 bytes, as on a GPU. only: the kernels that it has; all without.
        """
        device = self.new(architecture, exact_blocks=False)

        def build_and_load(source: str) -> tuple[bytes, str]:
            path = more / f"{source}.hip" if more else None
            path = path if path and path.exists() else source_file(source)
            made = build_kernels(path, architecture, self.folder / "counted", counted=True, only=only)
            return made.read_bytes(), str(made)

        device.modules._image = build_and_load  # type: ignore[method-assign]
        return device

    def unoptimized(self, architecture: str) -> Any:
        """Return a new device whose kernels make all memory accesses of their source, even if the values are unused."""
        device = self.new(architecture)

        def build_and_load(source: str) -> tuple[bytes, str]:
            made = build_kernels(source_file(source), architecture, self.folder / "unoptimized", optimized=False)
            return made.read_bytes(), str(made)

        device.modules._image = build_and_load
        return device

    def count(self, work: Callable[[], Any], *, l1: int = 256) -> dict[str, Counts]:
        """Count the memory accesses of kernels that `work` launches on a counting device, by kernel.

        l1: lines that L1 holds; it is empty at the start of a launch.
        """
        self.library.emulator_clear_counts()
        self.library.emulator_l1(l1)
        work()
        return {name: Counts(**found) for name, found in json.loads(self.library.emulator_counts()).items()}

    def new(self, architecture: str, **options: Any) -> Any:
        """Return a new device. By default, arrays end where memory ends (`exact_blocks`)."""
        from wgrad.hip.device import HipDevice

        os.environ["WGRAD_EMULATED_ARCH"] = architecture  # may name several, with commas
        device = bind(HipDevice)(**{"exact_blocks": True, **options})
        self._change(device)
        return device

    def _change(self, device: Any) -> None:
        """Kernels are built when they are first asked for; what its pools take back is NaN from then on."""
        device.modules._image = partial(self._build_and_load, device.modules)
        stream, poison = ctypes.c_void_p(int(device._stream)), self.library.emulator_poison
        for pool in (device._pool, device._host_pool):

            def release(block: Any, release: Any = pool._release) -> None:
                poison(ctypes.c_void_p(block.buffer), ctypes.c_size_t(block.nbytes), stream)
                release(block)

            pool._release = release

    def _build_and_load(self, modules: Modules, source: str) -> tuple[bytes, str]:
        """Kernels are built when they are first asked for."""
        if source_file(source).exists():
            self.build(source, modules.architecture)
        return Modules._image(modules, source)

    def select(self, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """`--device hip` finds this card for the rest of the test."""
        from wgrad.hip import device

        class BuildingDevice(device.HipDevice):
            def __init__(inner, gpu: Any = "") -> None:  # noqa: N805 - the emulator is self
                super().__init__(gpu)
                self._change(inner)

        monkeypatch.setenv("WGRAD_EMULATED_ARCH", architecture)
        monkeypatch.setattr(device, "HipDevice", BuildingDevice)

    def device(self, architecture: str) -> Any:
        """The session's device of this architecture."""
        if architecture not in self._devices:
            self._devices[architecture] = self.new(architecture)
        os.environ["WGRAD_EMULATED_ARCH"] = architecture
        return self._devices[architecture]


def leave_to_other_tests() -> None:
    """Hide the emulated GPU, which hip-python finds in this process from now on, from `auto` in other tests."""
    verdict = self_check.verdict

    def of_real_cards(device: Any) -> self_check.Verdict:
        emulated = str(getattr(device, "gpu", "")).startswith("Emulated")
        return self_check.Verdict(False, "an emulated card") if emulated else verdict(device)

    self_check.verdict = of_real_cards  # type: ignore[assignment]


def poison_numpy(library: ctypes.CDLL) -> None:
    """NumPy makes arrays in memory that is NaN before and after (numpy_memory.cpp), for the rest of the process."""
    make, get = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    api = ctypes.cast(get(np._core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))  # type: ignore[attr-defined]
    handler = make(ctypes.addressof(ctypes.c_char.in_dll(library, "emulator_numpy_memory")), b"mem_handler", None)
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(api[304])  # PyDataMem_SetHandler
    set_handler(handler)


def start(folder: Path) -> Emulator:
    """The emulator, built in `folder`; hip-python finds its card from now on.

    Work runs late, in an order of this day's; $WGRAD_EMULATED_SEED asks for another (emulator/queue.cpp).

    Raises:
        FileNotFoundError: there is no clang. DeviceError: hip-python is missing.
    """
    os.environ.pop("WGRAD_EMULATED_MEMORY", None)
    os.environ["WGRAD_HIP_OBJECTS"] = str(folder)
    os.environ.setdefault("WGRAD_EMULATED_SEED", str(datetime.date.today().toordinal()))
    os.environ["WGRAD_EMULATED_FAULTS"] = "report"  # ROCm would end the process, and so would the emulator
    found = Emulator(folder)
    poison_numpy(found.library)
    leave_to_other_tests()
    from wgrad.hip.runtime import binding

    binding.hip()
    return found
