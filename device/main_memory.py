"""Main memory of this machine: all that a process may use, and what is free."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # a container may have less than the machine


def main_memory() -> int | None:
    """Bytes of main memory that this process may use; None where the system does not tell."""
    if os.name == "nt":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its length and the load in the first word, then the total
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
        return int(status[1]) if known else None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _number("memory.max")
    return total if limit is None else min(total, limit)


def free_memory() -> int | None:
    """Bytes of main memory that are free without swapping; None where the system does not tell, as any but Linux."""
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    free = 1024 * next(int(line[1]) for line in lines if line[0] == "MemAvailable:")
    limit, used = _number("memory.max"), _number("memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def _number(name: str) -> int | None:
    try:
        return int((_GROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
