"""The record of which memory was overwritten and when: a backward may not read what changed after its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, memory_of

_writes = [0]  # how often arrays were overwritten
_written: dict[int, int] = {}  # the last of these times, by the id of the memory; what a freed one leaves is old
_MOST_WRITTEN = 1 << 16


def writes() -> int:
    """Return how often arrays were overwritten so far."""
    return _writes[0]


def note_writing(memories: Sequence[Any]) -> None:
    """Note that arrays in this memory (`memory_of`) are about to be overwritten."""
    if memories:
        _writes[0] += 1
        if len(_written) > _MOST_WRITTEN:
            _written.clear()
        _written.update((id(memory), _writes[0]) for memory in memories)


def written_since(then: int, saved: Any) -> bool:
    """Return whether arrays or Lazies in nested tuples, lists and dicts were overwritten since `writes` was `then`."""
    return _writes[0] > then and any(_written.get(id(memory), 0) > then for memory in _memories(saved))


def _memories(saved: Any) -> Iterator[Any]:
    """The memory of all arrays in nested values."""
    stack, seen = [saved], set()
    while stack:
        value = stack.pop()
        if id(value) in seen or value is None:
            continue
        seen.add(id(value))
        if isinstance(value, Lazy):
            array = value.made if value.made is not None else value.detail[0] if value.op == "view" else None
            stack += [array] if array is not None else value.args
        elif isinstance(value, tuple | list):
            stack += value
        elif isinstance(value, dict):
            stack += [part for name, part in value.items() if name != "_edges"]  # which are of other nodes
        elif isinstance(value, np.ndarray) or hasattr(value, "lease"):
            yield memory_of(value)
