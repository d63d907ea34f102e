"""Cores that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from wgrad.device.whole_numbers import whole_number

_GROUP = Path("/sys/fs/cgroup")  # a container may have fewer than the machine
# Environment variables in which Open MPI, MPICH and others, and MVAPICH tell how many ranks run on this host.
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
_STEP = "SLURM_STEP_NUM_TASKS"  # set in what srun starts, not in a batch script


def affinity() -> frozenset[int]:
    """Return the cores that the system lets this process run on."""
    known = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0) if known else range(os.cpu_count() or 1))


def usable_cores(group: Path = _GROUP, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many cores this process may use, alone on its host.

    Args:
        group: The folder of the control group, for tests.
        environment: Environment variables.

    Returns:
        The cores of its affinity, within the quota of its container and what Slurm has allocated on this host.
    """
    return share_of_cores(affinity(), [affinity()], environment, group)


def share_of_cores(
    own: Collection[int],
    ranks: Sequence[Collection[int]],
    environment: Mapping[str, str] = os.environ,
    group: Path = _GROUP,
) -> int:
    """Return how many cores this process may use next to other ranks of its host, at least 1.

    Args:
        own: Cores of this process's affinity.
        ranks: The affinity of each rank on this host, including this one. Ranks that are bound to cores of their own
            divide nothing.
        environment: Environment variables.
        group: The folder of the control group, for tests.
    """
    share = sum(Fraction(1, max(1, sum(core in cores for cores in ranks))) for core in own)
    host = [_quota(group), whole_number(environment.get("SLURM_CPUS_ON_NODE", ""))]
    bounds = [int(share), *(cores // len(ranks) for cores in host if cores)]
    if _started_by_srun(environment) and (of_task := whole_number(environment.get("SLURM_CPUS_PER_TASK", ""))):
        bounds.append(of_task)
    return max(1, min(bounds))


def ranks_on_this_host(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks a launcher has started on this host, including this one; 1 without a launcher."""
    counts = [whole_number(environment.get(name, "")) or 1 for name in LOCAL_RANKS]
    if _started_by_srun(environment):
        counts.append(_tasks_of_node(environment))
    return max(counts)


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process, not an mpirun that srun has started."""
    return _STEP in environment and not any(name in environment for name in LOCAL_RANKS)


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """Return how many tasks of a Slurm step run on this node: item SLURM_NODEID of a list such as "4(x2),3"."""
    node = whole_number(environment.get("SLURM_NODEID", "")) or 0
    for item in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (found := re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)) is None:
            break
        nodes = int(found[2] or 1)
        if node < nodes:
            return int(found[1])
        node -= nodes
    return whole_number(environment.get("SLURM_NTASKS_PER_NODE", "")) or 1


def _quota(group: Path) -> int | None:
    """Return the cores of a control group's quota, rounded up; None without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            return -(-int(quota) // int(period)) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
    return None
