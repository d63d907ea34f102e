"""The record of which memory was overwritten and when: a backward may not read what changed after its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, memory_of

_writes = [0]  # how many writes were noted so far
# The number of the last write, by the id of the memory. An id that freed memory leaves behind has an old number.
_written: dict[int, int] = {}
_MOST_WRITTEN = 1 << 16


def writes() -> int:
    """Return the number of writes noted so far."""
    return _writes[0]


def note_writing(memories: Sequence[Any]) -> None:
    """Note that arrays in this memory (`memory_of`) are about to be overwritten."""
    if memories:
        _writes[0] += 1
        if len(_written) > _MOST_WRITTEN:
            _written.clear()
        _written.update((id(memory), _writes[0]) for memory in memories)


def written_since(then: int, saved: Any) -> bool:
    """Return whether an array or Lazy in nested tuples, lists and dicts was overwritten since `writes()` was `then`."""
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
            stack += [part for name, part in value.items() if name != "_edges"]  # _edges lead to other nodes
        elif isinstance(value, np.ndarray) or hasattr(value, "lease"):
            yield memory_of(value)
