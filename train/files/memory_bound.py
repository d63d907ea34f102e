"""A temporary limit on the memory of this process, on Linux."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_within(memory: int) -> Iterator[None]:
    """Limit this process to `memory` bytes more than it has, within the block. Has no effect except on Linux."""
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
