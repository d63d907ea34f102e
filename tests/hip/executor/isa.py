"""Statistics of a kernel: registers, memory, counts and widths of its instructions, and its hot loop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.hip.executor.code_object import CodeObject, Instruction

_MATRIX = re.compile(r"v_(mfma|smfmac|wmma|swmmac)_")
_WIDTHS = (("b128|dwordx4", 128), ("b96|dwordx3", 96), ("b64|dwordx2", 64), ("byte|_u8|_i8|_b8", 8),
           ("short|_u16|_i16|_b16|d16", 16))  # fmt: skip
_ENDS = ("s_endpgm", "s_branch", "s_setpc")


class Loop(NamedTuple):
    """A loop, from its first instruction to the branch back, and the number of matrix instructions."""

    first: int
    last: int
    matrix: int


def is_matrix(text: str) -> bool:
    return _MATRIX.match(text) is not None


def deep_share(texts: Sequence[str]) -> float:
    """Return the share of CDNA's 16-bit matrix instructions that have CDNA4's depth; the others reach half its peak."""
    names = [text.split()[0] for text in texts if is_matrix(text)]
    return round(sum(re.search("16x16x32|32x32x16", name) is not None for name in names) / len(names), 4)


def width(name: str) -> int:
    """Bits of one lane in a memory access, by an instruction's name."""
    return next((bits for pattern, bits in _WIDTHS if re.search(pattern, name)), 32)


def is_pair(name: str) -> bool:
    """Return whether an LDS access has two addresses."""
    return re.search("read2|write2|2addr", name) is not None


def access(name: str) -> tuple[str, int] | None:
    """("load" or "store", bits) of an access to global memory; None for other instructions."""
    found = re.match(r"(?:global|buffer|flat)_(load|store)", name)
    return (found[1], width(name)) if found else None


def instructions(code: CodeObject, kernel: str) -> list[Instruction]:
    """Disassemble a kernel without the padding after its end."""
    listing = code.listing(kernel)
    ends = [n for n, i in enumerate(listing) if i.name.startswith(_ENDS)]
    return listing[: ends[-1] + 1] if ends else listing


def widths(found: Sequence[Instruction]) -> dict[str, dict[str, int]]:
    """Count accesses of each width (bits of a lane; "2x64": two addresses), by what they do; in order of width."""
    counts: dict[str, Counter[str]] = {n: Counter() for n in ("global_load", "global_store", "ds_read", "ds_write")}
    for name in (i.name for i in found):
        if global_access := access(name):
            counts[f"global_{global_access[0]}"][f"{name.partition('_')[0]}:{global_access[1]}"] += 1
        elif lds := re.match("ds_(read|load|write|store)", name):
            kind = "ds_read" if lds[1] in ("read", "load") else "ds_write"
            counts[kind][f"2x{width(name)}" if is_pair(name) else str(width(name))] += 1
    return {kind: dict(n) for kind, n in counts.items() if n}


def branch_target(i: Instruction) -> int | None:
    """Virtual address that a branch goes to."""
    found = re.match(r"s_c?branch\w*\s+(\d+|0x[0-9a-f]+)", i.text)
    if found is None:
        return None
    words = int(found[1], 0)
    return i.address + 4 + 4 * (words - 65536 if words > 32767 else words)


def loops(found: Sequence[Instruction]) -> list[Loop]:
    """Every branch back and what lies between."""
    index = {i.address: n for n, i in enumerate(found)}
    made = []
    for n, i in enumerate(found):
        target = branch_target(i)
        if target is not None and target <= i.address and target in index:
            first = index[target]
            made.append(Loop(first, n, sum(is_matrix(x.text) for x in found[first : n + 1])))
    return made


def hot_loop(found: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop with the most matrix instructions (the shortest of these); empty where there is none."""
    with_matrix = [loop for loop in loops(found) if loop.matrix]
    inner = [
        a for a in with_matrix
        if not any(b != a and a.first <= b.first and b.last <= a.last for b in with_matrix)
    ]  # fmt: skip
    best = max(inner, key=lambda loop: (loop.matrix, loop.first - loop.last), default=None)
    return list(found[best.first : best.last + 1]) if best else []


def invalidations(found: Sequence[Instruction]) -> int:
    """Count instructions in loops that invalidate a compute unit's cache."""
    inside = {n for loop in loops(found) for n in range(loop.first, loop.last + 1)}
    return sum(re.match(r"(buffer_(gl[01]_)?|global_)inv", found[n].name) is not None for n in inside)


def registers(code: CodeObject, kernel: str) -> dict[str, int]:
    """VGPRs with AGPRs, spilled registers, scratch bytes of a lane, LDS bytes of a work-group."""
    about: dict[str, Any] = code.kernels[kernel]
    descriptor = code.descriptor(kernel)
    spills = about.get(".vgpr_spill_count", 0) + about.get(".sgpr_spill_count", 0)
    return {
        "vgpr": about[".vgpr_count"],
        "spills": spills,
        "scratch": descriptor.scratch,
        "lds": descriptor.lds,
    }
