"""Main memory of this machine: the total that a process may use, and the free part."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # a container may have less than the machine
_MEMINFO = Path("/proc/meminfo")


def main_memory() -> int | None:
    """Return the bytes of main memory that this process may use; None if the system does not tell."""
    if os.name == "nt":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: length and load in the first word, then the total
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
        return int(status[1]) if known else None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _number("memory.max")
    return total if limit is None else min(total, limit)


def free_memory() -> int | None:
    """Return the bytes of main memory that are free without swapping; None except on Linux with such a figure."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines()]
        free = 1024 * next(int(line[1]) for line in lines if line[:1] == ["MemAvailable:"])
    except (OSError, ValueError, IndexError, StopIteration):  # some containers do not show it
        return None
    limit, used = _number("memory.max"), _number("memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def _number(name: str) -> int | None:
    try:
        return int((_GROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
