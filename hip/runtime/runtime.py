"""The HIP runtime: storage, kernel launches, recording and replay, profiling."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory, TooLarge
from wgrad.device.memory import Array, Block, Pool
from wgrad.device.runtime import PooledRuntime, Recording
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.binding import check
from wgrad.hip.runtime.compile import Modules
from wgrad.hip.runtime.gpus import Gpu, find_gpu
from wgrad.hip.runtime.launch import HOST_TO_HOST, TO_DEVICE, TO_HOST, Launch, Layout, Long, Packed, Transfer
from wgrad.hip.runtime.profiler import Profiler
from wgrad.hip.runtime.readback import Readback, Readbacks

T = TypeVar("T")
_LOGGER = logging.getLogger("wgrad")
MAX_WORK_ITEMS = (1 << 32) - 1  # of a launch along x, on every GPU
MAX_GROUPS = 65_535  # work-groups along y and z
_STAGING_BYTES = 64 << 20  # of host copies kept alive for uploads in flight
_RELAXED = 2  # hipStreamCaptureModeRelaxed


class Replay(Recording):
    """A recorded list of launches as one HIP graph, which runs them again on the same memory."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._launches: list[Launch | Transfer] = []
        self._graph: Any = None

    @property
    def dispatches(self) -> int:
        return len(self._launches)

    @property
    def names(self) -> list[str]:
        return [launch.name for launch in self._launches]

    def run(self) -> None:
        self._runtime._replay_launches(self)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._graph is not None and not _ending():
            self._runtime._hip.hipGraphExecDestroy(self._graph)


class Runtime(PooledRuntime):
    """One HIP device and stream. Arrays come from a pool; launches go to the stream immediately, in order.

    Args:
        gpu: Number of the GPU, part of its label (`find_gpu`), or a GPU already found; empty: the best.
        exact_blocks: Allocate exactly each array's size, for tests of accesses out of range.
    """

    name = "hip"
    # After a fault on the GPU, ROCm's runtime returns that error from every call, hipDeviceReset included (HIP_INIT_API
    # in clr's hip_internal.hpp). Older versions end the process.
    needs_new_process = True
    fastest_compute = "bfloat16"  # every architecture that has kernels has tensor cores for it

    def __init__(self, gpu: str | Gpu = "", *, exact_blocks: bool = False) -> None:
        hip = self._hip = binding.hip()
        found = self.found = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        self.index, self.architecture, self.gpu = found.index, found.architecture, found.name
        binding.use_device(self._hip, self.index)
        self.wave, self.compute_units = found.wave, found.compute_units
        self.modules = Modules(self.architecture, self.gpu, self.index)
        kernels = "shipped kernels" if self.modules.origin == "shipped" else "kernels by hiprtc"
        self.description = f"{found.label[:-1]}, {kernels})"
        self.facts = found.facts
        self.float16 = self.bfloat16 = True
        self._stream = check(hip.hipStreamCreate(), "a HIP stream")
        self._pool = Pool(self._create_buffer, self._destroy_block, exact=exact_blocks)
        self._host_pool = Pool(self._create_host_buffer, self._destroy_host_block)
        self.shared_memory = found.integrated
        self._layouts: dict[str, Layout] = {}
        # A launch copies its arguments, so one buffer serves all launches.
        self._arguments = ctypes.create_string_buffer(4096)
        self._readbacks = Readbacks(hip, self._stream)
        self._uploads: list[np.ndarray] = []  # host memory that copies in flight read from
        self._last: Launch | Transfer | None = None
        self._sync = os.environ.get("WGRAD_HIP_SYNC", "")  # "1": wait for each launch; "trace": and print it before
        self._graphs = os.environ.get("WGRAD_HIP_GRAPHS") != "0" and not self._sync  # replay as HIP graphs

    # ---- storage -------------------------------------------------------------------------
    def _create_buffer(self, nbytes: int) -> int:
        pool = self._pool
        binding.use_device(self._hip, self.index)
        try:
            return int(check(self._hip.hipMalloc(nbytes), f"no memory for {nbytes:,} bytes on {self.description}"))
        except OutOfMemory as error:
            used = f"{pool.in_use_bytes:,} bytes in use, {pool.reserved_bytes:,} reserved"
            raise OutOfMemory(f"{error}; {used}") from None

    def free_memory(self) -> int | None:
        return None if self.shared_memory else binding.free_memory(self._hip, self.index)

    def _destroy_block(self, block: Block) -> None:
        self.synchronize()
        check(self._hip.hipFree(block.buffer), "hipFree")

    def _create_host_buffer(self, nbytes: int) -> int:
        """Allocate pinned memory, which the GPU copies from and to without the host; kernels use the same address."""
        binding.use_device(self._hip, self.index)
        return int(check(self._hip.hipHostMalloc(nbytes, 0), f"{nbytes:,} bytes of pinned main memory"))

    def _destroy_host_block(self, block: Block) -> None:
        self.synchronize()
        check(self._hip.hipHostFree(block.buffer), "hipHostFree")

    def transfer(self, src: Array, out: Array) -> None:
        """Copy src to out on the stream; one of them is pinned main memory."""
        self.check_owner(src)
        self.check_owner(out)
        if not out.nbytes:
            return
        kind = TO_HOST if out.lease.of(self._host_pool) else TO_DEVICE
        made = Transfer(out.address, src.address, out.nbytes, kind)
        if self._replay is not None:
            self._replay._launches.append(made)
            self._keep([src, out])
        self._issue(made)

    def _fill_words(self, out: Array, word: int) -> None:
        if out.nbytes:
            groups = self.groups(out.nbytes, 256 * 16)
            self.launch("storage", "fill", [out, word, Long(out.nbytes)], groups, work=out.nbytes)

    def copy(self, src: Array, out: Array) -> None:
        """Copy src to out, of the same size and dtype."""
        if out.nbytes:
            groups = self.groups(out.nbytes, 256 * 16)
            self.launch("storage", "copy", [src, out, Long(out.nbytes)], groups, work=2 * out.nbytes)

    def _write_new(self, array: Array, host: np.ndarray) -> None:
        self.write(array, host)

    def write(self, array: Array, host: np.ndarray) -> None:
        self.check_owner(array)
        data = np.array(host, dtype=array.dtype, order="C", copy=True)
        if not data.nbytes:
            return
        check(
            self._hip.hipMemcpyAsync(
                array.address, data.ctypes.data, data.nbytes, self._kind(array, TO_DEVICE), self._stream
            ),
            lambda: f"copying {array} to the device",
        )
        self._uploads.append(data)
        if sum(d.nbytes for d in self._uploads) > _STAGING_BYTES or len(self._uploads) > 256:
            self.synchronize()

    def readback(self, array: Array, out: np.ndarray | None = None) -> Readback:
        """Start copying an array to the host; later work may overwrite the array."""
        self.check_owner(array)
        binding.use_device(self._hip, self.index)
        return self._readbacks.start(array, out, lambda: f"copying {array} to the host (last launch: {self._last})")

    def _kind(self, array: Array, kind: int) -> Any:
        """Return the kind of copy to ask the driver for, where the other side is memory of NumPy."""
        return self._hip.hipMemcpyKind(HOST_TO_HOST if array.lease.of(self._host_pool) else kind)

    def download(self, array: Array) -> np.ndarray:
        self.check_owner(array)
        out = np.empty(array.shape, array.dtype)
        if out.nbytes:
            check(
                self._hip.hipMemcpyAsync(
                    out.ctypes.data, array.address, out.nbytes, self._kind(array, TO_HOST), self._stream
                ),
                lambda: f"copying {array} to the host (last launch: {self._last})",
            )
        self.synchronize()
        return out

    def synchronize(self) -> None:
        binding.wait_for_stream(
            self._hip, self._stream, lambda: f"work on {self.description} failed (last launch: {self._last})"
        )
        self._uploads.clear()

    def once(self, make: Callable[[Runtime], T]) -> T:
        """Return make(self), computed at the first call and kept as long as this device."""
        made: dict[Callable[[Runtime], T], T] = self.__dict__.setdefault("_made", {})
        if make not in made:
            made[make] = make(self)
        return made[make]

    @contextmanager
    def planned_for(self, compute_units: int) -> Iterator[None]:
        """Choose kernels as for a GPU with so many compute units, within a `with`; 1 forces large tiles."""
        before, self.compute_units = self.compute_units, compute_units
        try:
            yield
        finally:
            self.compute_units = before

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Key of a self-check's verdict: GPU, architecture, driver version, digest of its kernels."""
        return self.gpu, self.architecture, str(binding.driver_version()), self.modules.digest()

    def pipelines_compiled(self) -> int:
        return self.modules.compiled

    def prepare(self, dry: Any, progress: Callable[[int, int], None] | None = None) -> int:
        """Load, or compile by hiprtc, the kernels that `dry` (a `dry_run` of this device) launched; return how many.

        What does not compile is left for `launch` to report. progress: called with (done, total).
        """
        before = self.modules.compiled
        for number, (source, kernel) in enumerate(dry.kernels):
            if progress is not None:
                progress(number, len(dry.kernels))
            try:
                self.modules.get(source, kernel)
            except DeviceError:
                continue
        if progress is not None:
            progress(len(dry.kernels), len(dry.kernels))
        return self.modules.compiled - before

    # ---- launches ------------------------------------------------------------------------
    @staticmethod
    def groups(items: int, per_group: int) -> tuple[int, int, int]:
        """Return the grid for `items`, along x."""
        return max(1, -(-items // per_group)), 1, 1

    def check_owner(self, array: Array) -> None:
        """Raise DeviceError for an array of another device."""
        lease = getattr(array, "lease", None)
        if lease is None or not (lease.of(self._pool) or lease.of(self._host_pool)):
            raise DeviceError(f"{array!r:.100} is not an array of {self.description}; upload it to this device first")

    @staticmethod
    def _check_grid(kernel: str, grid: tuple[int, int, int], threads: int) -> None:
        if grid[0] * threads > MAX_WORK_ITEMS or max(grid[1:]) > MAX_GROUPS:
            raise TooLarge(
                f"{kernel}: a launch of {grid} work-groups of {threads} exceeds {MAX_WORK_ITEMS:,} work-items along x,"
                f" or {MAX_GROUPS:,} work-groups along y or z; use a smaller batch or sequence length"
            )

    def launch(
        self,
        source: str,
        kernel: str,
        arguments: Sequence[Any],
        grid: tuple[int, int, int],
        *,
        threads: int = 256,
        work: float = 0.0,
    ) -> None:
        """Submit `kernel` of `source`.hip.

        arguments: In the kernel's order: Array or None (pointer), int (32 bits), Long (64 bits), float (32 bits).
        grid: work-groups; threads: work-items of each, as the kernel declares. work: FLOP, or bytes if memory-bound.
        """
        self._check_grid(kernel, grid, threads)
        function = self.modules.get(source, kernel)
        kinds: list[str] = []
        values: list[int | float] = []
        for a in arguments:
            if isinstance(a, Array):
                self.check_owner(a)
                kinds.append("P")
                values.append(a.address)
            elif a is None:
                kinds.append("P")
                values.append(0)
            elif isinstance(a, float):
                kinds.append("f")
                values.append(a)
            else:
                long = isinstance(a, Long)
                kinds.append("Q" if long else "I")
                values.append(int(a) & (0xFFFFFFFFFFFFFFFF if long else 0xFFFFFFFF))
        key = "".join(kinds)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = Layout(key, ctypes.addressof(self._arguments))
        arrays = [a for a in arguments if isinstance(a, Array)]
        shapes = tuple((a.shape, a.dtype) for a in arrays)
        packed = Packed(layout, layout.struct.pack(*values))
        launch = Launch(kernel, function, grid, threads, packed, shapes)
        if self._replay is not None:
            self._replay._launches.append(launch)
            self._keep(arrays)
        self._issue(launch)

    def _issue(self, launch: Launch | Transfer) -> None:
        if self._sync == "trace":  # a fault of a kernel ends the process inside ROCm
            values = f", arguments {launch.arguments}" if isinstance(launch, Launch) else ""
            print(f"launch: {launch}{values}", file=sys.stderr, flush=True)
        self._enqueue(launch)
        if self._sync:
            self.synchronize()

    def _enqueue(self, launch: Launch | Transfer) -> None:
        self._last = launch
        if isinstance(launch, Transfer):
            kind = self._hip.hipMemcpyKind(launch.kind)
            check(
                self._hip.hipMemcpyAsync(launch.target, launch.source, launch.nbytes, kind, self._stream), str(launch)
            )
            return
        if self.profiler is not None:
            self.profiler.before(launch.name)
        layout, values = launch.packed
        ctypes.memmove(self._arguments, values, len(values))
        # Not by `extra`: ROCm's HRX runtime does not read that (ROCm/hrx-system#156).
        code = self._hip.hipModuleLaunchKernel(
            launch.function, *launch.grid, launch.threads, 1, 1, 0, self._stream, layout.pointers, None
        )
        if int(code[0]):
            check(code, str(launch))
        if self.profiler is not None:
            self.profiler.after()

    def _new_replay(self) -> Replay:
        return Replay(self)

    def _replay_launches(self, replay: Replay) -> None:
        if not replay._launches:
            return
        if self.profiler is None and self._graphs:  # a graph has no events between its kernels
            try:
                if replay._graph is None:
                    replay._graph = self._make_graph(replay._launches)
                self._last = replay._launches[-1]
                check(self._hip.hipGraphLaunch(replay._graph, self._stream), f"replay of {replay.dispatches} launches")
                return
            except DeviceLost:
                raise
            except DeviceError as error:
                self._graphs = False
                _LOGGER.warning(
                    "note: HIP graphs fail here, so kernels are launched one by one, which is slower: %s", error
                )
        for launch in replay._launches:
            self._issue(launch)

    def _make_graph(self, launches: list[Launch | Transfer]) -> Any:
        """Capture the launches from a stream into an executable graph."""
        mode = self._hip.hipStreamCaptureMode(_RELAXED)
        check(self._hip.hipStreamBeginCapture(self._stream, mode), "recording a HIP graph")
        try:
            for launch in launches:
                self._issue(launch)
        finally:
            graph = check(self._hip.hipStreamEndCapture(self._stream), "recording a HIP graph")
        try:
            return check(self._hip.hipGraphInstantiateWithFlags(graph, 0), f"a HIP graph of {len(launches)} launches")
        finally:
            check(self._hip.hipGraphDestroy(graph), "hipGraphDestroy")

    def _new_profiler(self) -> Profiler:
        """Return a profiler with events around every launch."""
        binding.use_device(self._hip, self.index)
        return Profiler(self._hip, self._stream)
