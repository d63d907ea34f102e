"""A bound on the memory that this process may take, where the system has one of the kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_within(memory: int) -> Iterator[None]:
    """Let this process take so many bytes beyond what it has. No bound where the system is not Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (used + memory, soft) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
