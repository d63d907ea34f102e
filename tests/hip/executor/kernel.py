"""A kernel in memory, ready to run: its instructions are compiled as they are first reached."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from typing import Any

from tests.hip.executor import machine
from tests.hip.executor.code_object import CodeObject, ExecutorError, Instruction
from tests.hip.executor.instructions import dpp_lanes, override
from tests.hip.executor.machine import Dpp, Entry, Kind
from tests.hip.executor.memory import Guarded
from tests.hip.executor.tinygrad_emulator import ARCHITECTURES, compile_instruction, plain

_MOST_LDS = 65536


class Kernel:
    """`name` of a code object. bias: what is added to a virtual address to get one of this process.

    Raises:
        ExecutorError: it has no such kernel, or one that the executor cannot run.
    """

    def __init__(self, code: CodeObject, name: str) -> None:
        if code.architecture not in ARCHITECTURES:
            raise ExecutorError(f"{name}: no executor for {code.architecture}; it knows {', '.join(ARCHITECTURES)}")
        if name not in code.kernels:
            raise ExecutorError(f"no kernel '{name}'; the code object has {', '.join(code.kernels)}")
        self.code, self.name, self.metadata = code, name, code.kernels[name]
        self.descriptor, self.lanes = code.descriptor(name), code.lanes(name)
        if self.lanes != (64 if code.architecture.startswith("gfx9") else 32):
            raise ExecutorError(f"{name}: waves of {self.lanes} lanes are not modeled on {code.architecture}")
        if self.descriptor.lds > _MOST_LDS or self.descriptor.scratch:
            raise ExecutorError(f"{name}: more than {_MOST_LDS:,} bytes of LDS, or scratch memory, is not modeled")
        low = min(s.address for s in code.segments)
        high = max(s.address + s.size for s in code.segments)
        self._image = Guarded(high - low + 256, align=4096)
        self.bias = self._image.address - low
        for segment in code.segments:
            ctypes.memmove(self.bias + segment.address, segment.data, len(segment.data))
        self.base, self.words = self.bias + low, (high - low) // 4
        self.entries = (Entry * self.words)()
        self.listing = {i.address: i for i in code.listing(name)}
        self._keep: list[Any] = []

    def entry(self, pc: int) -> Entry:
        """Return the entry of the instruction at an address of this process."""
        return self.entries[(pc - self.base) // 4]

    def text(self, pc: int) -> str:
        """`kernel at 0x1234: instruction`, for messages."""
        found = self.listing.get(pc - self.bias)
        return f"{self.name} at {pc - self.bias:#x}: {found.text if found else 'no instruction'}"

    def executed(self) -> Counter[str]:
        """Count the executions of each instruction since the kernel was loaded, by name."""
        counts: Counter[str] = Counter()
        for address, instruction in self.listing.items():
            if count := self.entry(address + self.bias).executed:
                counts[instruction.name] += count
        return counts

    def compile(self, pc: int) -> None:
        """Makes the instruction at `pc` ready to run.

        Raises:
            ExecutorError: there is none, or the executor does not know it.
        """
        found = self.listing.get(pc - self.bias)
        if found is None:
            raise ExecutorError(f"{self.text(pc)}: a jump out of the kernel")
        low, high = (ctypes.c_uint32.from_address(pc + 4 * i).value for i in (0, 1))
        if found.name.endswith("_dpp"):
            self._override(pc, "machine_dpp", self._dpp(found, low, high))
        elif (
            made := override(found, (low, high), self.code.architecture, self.lanes, self.descriptor.lds)
        ) is not None:
            self._override(pc, *made)
        else:
            self._emulate(self.entry(pc), pc, found)

    def _override(self, pc: int, function: str, parameters: ctypes.Structure | ctypes.c_int) -> None:
        self._keep.append(parameters)
        entry = self.entry(pc)
        entry.function, entry.parameters = machine.address_of(function), ctypes.addressof(parameters)
        entry.kind = Kind.OVERRIDE

    def _emulate(self, entry: Entry, address: int, found: Instruction) -> None:
        made = compile_instruction(address, self.code.architecture)
        compared = not found.name.startswith(("v_dual", "s_waitcnt"))
        if compared and plain(found.name) != plain(made.name):
            raise ExecutorError(f"{self.name}: LLVM reads {found.text}, tinygrad's decoder {made.name}")
        self._keep.append(made)
        entry.function, entry.arguments = made.address, len(made.buffers)
        entry.buffers[: len(made.buffers)] = made.buffers
        entry.kind = Kind.BARRIER if found.name in ("s_barrier", "s_barrier_wait") else Kind.EMULATED

    def _dpp(self, found: Instruction, low: int, high: int) -> Dpp:
        """Return an instruction with DPP and its plain form, which reads a VGPR that the instruction does not use."""
        if found.size != 8 or "e64" in found.name or high >> 22 & 3 or (self.lanes == 32 and high >> 18 & 1):
            raise ExecutorError(f"{found.text}: this form of DPP is not modeled")
        if high >> 20 & 3 and not re.search("f32", found.name):
            raise ExecutorError(f"{found.text}: DPP with modifiers is modeled for float32 only")
        used = {high & 0xFF} | {(low >> at & 0xFF) + n for at in (9, 17) for n in (0, 1)}
        borrowed = next(r for r in range(255, 0, -1) if r not in used)
        beside = Guarded(64, align=64)
        ctypes.c_uint32.from_address(beside.address).value = low & ~0x1FF | machine.FIRST_VGPR + borrowed
        sources, enabled = dpp_lanes(high >> 8 & 0x1FF, self.lanes, high >> 28, high >> 24 & 15)
        made = Dpp(
            plain_pc=beside.address, source=high & 0xFF, borrowed=borrowed, lanes=self.lanes, zero=high >> 19 & 1,
            negate=high >> 20 & 1, absolute=high >> 21 & 1,
        )  # fmt: skip
        made.lane[: self.lanes], made.enabled[: self.lanes] = sources, enabled
        self._emulate(made.plain, beside.address, found)
        self._keep.append(beside)
        return made
