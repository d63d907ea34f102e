"""Overwriting memory: lazy Tensors that read it are computed before, and a backward may not read it afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from wgrad.autograd.lazy import Lazy, memory_of
from wgrad.device.contract import Array

# Tensors whose values are not computed yet, by id.
waiting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_writes = [0]  # how many writes were noted so far
# The number of the last write, by the id of the memory. An id that freed memory leaves behind has an old number.
_written: dict[int, int] = {}
_MOST_WRITTEN = 1 << 16


def before_writing(arrays: Iterable[Array] | None = None) -> None:
    """Compute the lazy Tensors that depend on arrays which are about to be overwritten. None: all lazy Tensors."""
    memory = None if arrays is None else [memory_of(array) for array in arrays]
    note_writing(memory or ())
    for reference in waiting.valuerefs():  # a copy, because other threads add to it
        tensor = reference()
        held = None if tensor is None else tensor._data
        if tensor is not None and isinstance(held, Lazy) and (memory is None or any(held.reads(m) for m in memory)):
            tensor.data  # noqa: B018


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
