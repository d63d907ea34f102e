"""Cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from wgrad.device.whole_numbers import whole_number

_GROUP = Path("/sys/fs/cgroup")  # a container may have fewer than the machine
# Environment variables in which Open MPI, and MPICH and others, tell how many ranks run on this host.
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def usable_cores(group: Path = _GROUP) -> int:
    """Return how many cores this process may use: its affinity, within the quota of its container.

    Args:
        group: The folder of the control group, for tests.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(group)
    return max(1, cores if quota is None else min(cores, quota))


def ranks_on_this_host(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks a launcher has started on this host, including this one; 1 without a launcher."""
    return max((whole_number(environment.get(name, "")) or 1 for name in LOCAL_RANKS), default=1)


def _quota(group: Path) -> int | None:
    """Return the cores of a control group's quota, rounded up; None without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            return -(-int(quota) // int(period)) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
    return None
