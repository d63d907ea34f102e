"""Runs a grid: work-groups one after another, the waves of each in an order of choice from barrier to barrier.

What is not modeled, so that what passes here may fail on a GPU: `s_waitcnt` and other waits, coherence of caches,
waves that run at the same time, more than 64 KiB of LDS. LDS and registers start as NaN.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np

from tests.hip.executor import machine
from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.machine import Run, Stop
from tests.hip.executor.memory import Guarded

Grid = tuple[int, int, int]
Order = Literal["fwd", "rev"]
POISON = 0x7FF77FF7  # NaN as a float32, and as two float16 or two bfloat16
_REGISTERS = 256  # VGPRs, and AGPRs
_SCALARS = 320  # SGPRs and what tinygrad keeps behind them: constants by their number in an operand, the counter
_LAST_SGPR = 106
_TTMP7, _TTMP9 = 115, 117
_MOST_TRACED = 1 << 20
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2PI = 0x3E22F983, 248
# Bits of `properties` of the kernel descriptor: what a wave finds in its first SGPRs, in this order.
# Source: LLVM, User Guide for AMDGPU Backend, "Initial Kernel Execution State".
_PRIVATE, _DISPATCH, _QUEUE, _ARGUMENTS, _ID, _FLAT_SCRATCH, _PRIVATE_SIZE = (1 << bit for bit in range(7))


class Launch(NamedTuple):
    """One launch. grid: work-groups; threads: of one, along x. arguments: address of the argument segment."""

    kernel: Kernel
    grid: Grid
    threads: int
    arguments: int
    around: Callable[[int], str] = lambda address: ""  # says what lies near an address, for messages


class _Wave:
    """Registers of a wave, and where it stands."""

    def __init__(self, launch: Launch, packet: int, group: Grid, number: int, lds: int) -> None:
        kernel, lanes = launch.kernel, launch.kernel.lanes
        count = min(lanes, launch.threads - number * lanes)
        self.scalars = _constants()
        self.vectors = np.full((_REGISTERS, lanes), POISON, np.uint32)
        self.accumulators = np.full_like(self.vectors, POISON) if lanes == 64 else self.vectors
        self._set(machine.EXEC, (1 << count) - 1)
        self._set(machine.PC, kernel.bias + kernel.descriptor.entry)
        self._place(launch, packet, group)
        self.vectors[0, :count] = np.arange(count) + number * lanes
        self.buffers = (ctypes.c_uint64 * machine.BUFFERS)()
        self.buffers[machine.SCALARS] = self.scalars.ctypes.data
        self.buffers[machine.VECTORS] = self.vectors.ctypes.data
        self.buffers[machine.LDS] = lds
        self.buffers[machine.ACCUMULATORS] = self.accumulators.ctypes.data

    def _set(self, at: int, value: int) -> None:
        self.scalars[at : at + 2] = value & 0xFFFFFFFF, value >> 32

    def _place(self, launch: Launch, packet: int, group: Grid) -> None:
        """Return the first SGPRs as the hardware sets them."""
        descriptor, at = launch.kernel.descriptor, 0
        given = ((_PRIVATE, 4, 0), (_DISPATCH, 2, packet), (_QUEUE, 2, 0), (_ARGUMENTS, 2, launch.arguments),
                 (_ID, 2, 0), (_FLAT_SCRATCH, 2, 0), (_PRIVATE_SIZE, 1, 0))  # fmt: skip
        for bit, words, value in given:
            if descriptor.properties & bit:
                self._set(at, value)
                at += words
        if launch.kernel.code.architecture.startswith(
            "gfx12"
        ):  # numbers of the work-group are in registers of their own
            self.scalars[_TTMP9], self.scalars[_TTMP7] = group[0], group[1] | group[2] << 16
            return
        at = max(at, descriptor.rsrc2 >> 1 & 31)  # user SGPRs in all
        for axis, number in enumerate(group):
            if descriptor.rsrc2 >> 7 + axis & 1:
                self.scalars[at] = number
                at += 1

    @property
    def pc(self) -> int:
        return int(self.scalars[machine.PC]) | int(self.scalars[machine.PC + 1]) << 32


def _constants() -> np.ndarray:
    made = np.full(_SCALARS, POISON, np.uint32)
    made[_LAST_SGPR:] = 0
    made[128:193] = np.arange(65)
    made[193:209] = (-1 - np.arange(16)).astype(np.int32).view(np.uint32)
    for number, value in _FLOATS.items():
        made[number] = np.float32(value).view(np.uint32)
    made[_INVERSE_2PI[1]] = _INVERSE_2PI[0]
    return made


def run(launch: Launch, order: Order = "fwd") -> int:
    """Run the whole grid, and return the instructions executed by all waves. order: which wave goes first.

    Raises:
        ExecutorError: an access out of bounds, an instruction that is not known, arguments that do not fit.
    """
    x, y, z = launch.grid
    groups = ((i, j, k) for k in range(z) for j in range(y) for i in range(x))
    return _run(launch, order, groups, {})


def trace(launch: Launch, group: Grid, waves: Iterable[int]) -> list[list[int]]:
    """Virtual addresses of the instructions that some waves of one work-group execute, in order."""
    traces: dict[int, list[int]] = {wave: [] for wave in waves}
    _run(launch, "fwd", [group], traces)
    return list(traces.values())


def _run(launch: Launch, order: Order, groups: Iterable[Grid], traces: dict[int, list[int]]) -> int:
    kernel, threads = launch.kernel, launch.threads
    most = kernel.metadata[".max_flat_workgroup_size"]
    if threads > most:
        raise ExecutorError(f"{kernel.name}: {threads} work-items a work-group, compiled for {most} at most")
    packet = Guarded(64, align=64)  # hsa_kernel_dispatch_packet_t
    sizes = [launch.grid[0] * threads, *launch.grid[1:]]
    about = struct.pack(
        "<HHHHHHIIIIIQQQQ", 0, 2, threads, 1, 1, 0, *sizes, 0, kernel.descriptor.lds,
        kernel.bias + kernel.descriptor.address, launch.arguments, 0, 0,
    )  # fmt: skip
    ctypes.memmove(packet.address, about, len(about))
    executed = 0
    machine.library().machine_watch()
    try:
        for group in groups:
            executed += _Group(launch, packet.address, group, traces).run(order)
    finally:
        machine.library().machine_unwatch()
        packet.free()
    return executed


class _Group:
    """A work-group: its LDS and its waves."""

    def __init__(self, launch: Launch, packet: int, group: Grid, traces: dict[int, list[int]]) -> None:
        self.launch, self.group, self.traces = launch, group, traces
        size = launch.kernel.descriptor.lds
        self.lds = Guarded(max(size, 16))
        self.lds.view()[:] = np.resize(np.array([POISON], "<u4").view(np.uint8), self.lds.nbytes)
        count = -(-launch.threads // launch.kernel.lanes)
        self.waves = [_Wave(launch, packet, group, number, self.lds.address) for number in range(count)]
        kernel = launch.kernel
        flush = (kernel.descriptor.rsrc1 >> 16 & 3) == 0  # FLOAT_DENORM_MODE_32
        self.state = Run(ctypes.addressof(kernel.entries), kernel.base, kernel.words, flush)
        self.state.room = _MOST_TRACED
        self._traced = (ctypes.c_uint32 * (_MOST_TRACED if traces else 0))()

    def run(self, order: Order) -> int:
        """Run the work-group and return the number of executed instructions."""
        try:
            live = list(range(len(self.waves)))
            while live:
                for number in live if order == "fwd" else live[::-1]:
                    if self._to_barrier(number):
                        live = [n for n in live if n != number]
            if not self.lds.untouched():
                raise ExecutorError(f"{self.launch.kernel.name}: work-group {self.group} wrote past the end of LDS")
        finally:
            self.lds.free()
        return int(self.state.executed)

    def _to_barrier(self, number: int) -> bool:
        """Runs a wave until it is at a barrier or has ended (True)."""
        wave, kernel, library = self.waves[number], self.launch.kernel, machine.library()
        self.state.trace = ctypes.addressof(self._traced) if number in self.traces else None
        self.state.traced = 0
        while (stop := library.machine_run(ctypes.byref(self.state), wave.buffers)) == Stop.COMPILE:
            kernel.compile(wave.pc)
        if number in self.traces:
            if self.state.traced == _MOST_TRACED:
                raise ExecutorError(
                    f"{kernel.name}: {_MOST_TRACED:,} instructions without a barrier: too many to trace"
                )
            addresses = np.ctypeslib.as_array(self._traced)[: self.state.traced].astype(np.int64) * 4
            self.traces[number] += (addresses + kernel.base - kernel.bias).tolist()
        if stop not in (Stop.ENDED, Stop.BARRIER):
            raise ExecutorError(
                f"{kernel.text(wave.pc)}: {self._reason(stop)} (work-group {self.group}, wave {number})"
            )
        return bool(stop == Stop.ENDED)

    def _reason(self, stop: int) -> str:
        if stop == Stop.LOST:
            return "the program counter left the code object"
        if stop == Stop.ERROR:
            return machine.ERRORS[self.state.error]
        address = int(self.state.fault)
        if self.lds.holds(address):
            near = f"byte {address - self.lds.address} of {self.launch.kernel.descriptor.lds} bytes of LDS"
        else:
            near = self.launch.around(address)
        return f"memory access fault at {address:#x}, {near}"
