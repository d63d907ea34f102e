"""A static check of compiled kernels: before every barrier a wave has waited for its accesses to LDS.

The executor runs an access at once, so a missing wait changes no result there. On a GPU the barrier would let other
waves read what is not stored yet. Source: LLVM, User Guide for AMDGPU Backend, "Memory Model".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.hip.executor.code_object import Instruction

_BARRIERS = ("s_barrier", "s_barrier_signal")
_HAND_OVER = ("ds_bpermute", "ds_permute", "ds_swizzle")  # between lanes, not through memory
_ALL = re.compile(r"lgkmcnt\(0\)|s_waitcnt 0x?0*$|s_wait_(ds|loadcnt_ds|storecnt_ds)cnt 0x0$")
_JUMP = re.compile(r"s_(c?branch\S*) (\d+)")


def unwaited_barriers(kernel: Sequence[Instruction]) -> list[int]:
    """Return the addresses of barriers that an access to LDS may reach unfinished, by any way through the kernel."""
    numbers = {instruction.address: number for number, instruction in enumerate(kernel)}
    arrives: list[bool | None] = [None] * len(kernel)  # is an access under way; None: not reached
    arrives[0] = False
    found, waiting = set(), [0]
    while waiting:
        number = waiting.pop()
        instruction, busy = kernel[number], bool(arrives[number])
        if busy and instruction.name in _BARRIERS:
            found.add(instruction.address)
        if instruction.name.startswith("ds_") and not instruction.name.startswith(_HAND_OVER):
            busy = True
        elif _ALL.search(instruction.text):
            busy = False
        for after in _successors(instruction, number, numbers):
            if after < len(kernel) and (arrives[after] is None or busy and not arrives[after]):
                arrives[after] = busy
                waiting.append(after)
    return sorted(found)


def _successors(instruction: Instruction, number: int, numbers: dict[int, int]) -> list[int]:
    if instruction.name == "s_endpgm":
        return []
    jump = _JUMP.match(instruction.text)
    if jump is None:
        return [number + 1]
    words = int(jump[2]) - (int(jump[2]) >> 15 << 16)  # 16 bits, signed
    target = numbers[instruction.address + instruction.size + 4 * words]
    return [target] if jump[1] == "branch" else [number + 1, target]
