"""Parts of work that are alike, such as the layers of a model: a dry run takes the memory of one for the others.

Once two such parts in turn have made the same calls of the memory pool, a dry run makes these calls in place of the
work of further ones. So the pool goes through the same states, and the run has the same peak, in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from wgrad.device.dry_run import DryRuntime
from wgrad.device.memory import Array, Block, Lease, Pool

Arrays = list[Array | None]
Inputs = list[Sequence[Array]]
Results = tuple[Arrays, Any]  # arrays, and others
_TAKE, _RETURN, _DROP = range(3)  # a block of so many bytes; the block taken at this number; the input at this index


class _Elsewhere:
    """Calls of the pool of main memory, after which a trace cannot be used."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace

    def taken(self, block: Block, nbytes: int) -> None:
        self._trace.usable = False

    def returned(self, block: Block) -> None:
        self._trace.usable = False


class _Trace:
    """Calls of the pool during work, and its results.

    Attributes:
        calls: Kind and number of each call, in order.
        usable: Whether others can make the same calls: not if the work freed arrays of others, or left some behind.
        results: For each array its block's number, its offset, shape and dtype; and what else the work returned.
    """

    def __init__(self, inputs: Sequence[Array]) -> None:
        self.calls: list[tuple[int, int]] = []
        self.usable = True
        self.results: tuple[list[Any], Any] = [], None
        self._inputs, self._there, self._count = dict[Block, int](), dict[Block, int](), 0
        for index, array in enumerate(inputs):
            self._inputs.setdefault(array.lease.block, index)

    @property
    def elsewhere(self) -> _Elsewhere:
        return _Elsewhere(self)

    def taken(self, block: Block, nbytes: int) -> None:
        self._there[block] = self._count
        self._count += 1
        self.calls.append((_TAKE, nbytes))

    def returned(self, block: Block) -> None:
        if (number := self._there.pop(block, None)) is not None:
            self.calls.append((_RETURN, number))
        elif (index := self._inputs.pop(block, None)) is not None:
            self.calls.append((_DROP, index))
        else:
            self.usable = False

    def end(self, arrays: Arrays, others: Any) -> None:
        """Note the results."""
        numbers = [None if array is None else self._there.get(array.lease.block, -1) for array in arrays]
        self.usable = self.usable and -1 not in numbers and set(numbers) - {None} == set(self._there.values())
        placed = [array and (n, array.offset, array.shape, array.dtype) for n, array in zip(numbers, arrays)]
        self.results = placed, others
        self._inputs, self._there = {}, {}  # they hold memory

    def like(self, other: _Trace | None) -> bool:
        """Return whether both are of work that takes the same memory."""
        if other is None or not (self.usable and other.usable):
            return False
        return (self.calls, self.results) == (other.calls, other.results)

    def repeat(self, pool: Pool, inputs: list[Array]) -> Results:
        """Make the calls, and return results like those of the work. inputs: in place of its own."""
        blocks = [array.lease.block for array in inputs]
        given: Arrays = [*inputs]
        inputs.clear()
        there: list[Lease | None] = []
        for kind, number in self.calls:
            if kind == _TAKE:
                there.append(pool.allocate(number))
            elif kind == _RETURN:
                there[number] = None
            else:
                given = [None if block is blocks[number] else array for array, block in zip(given, blocks)]
        placed, others = self.results
        arrays: Arrays = [place and Array(there[place[0]], *place[1:]) for place in placed]
        return arrays, others


class Repeats:
    """Runs work that a device does for several parts alike, or takes its memory in a dry run."""

    def __init__(self, device: Any) -> None:
        self._device = device if isinstance(device, DryRuntime) and device.repeats else None
        self._traces: dict[Hashable, tuple[_Trace, bool]] = {}  # the last one by kind; whether that before was like it

    @property
    def is_used(self) -> bool:
        """Return whether work may be replaced; else kinds do not matter."""
        return self._device is not None

    def __call__(self, kind: Hashable, work: Callable[[], Results], inputs: Inputs | None = None) -> Results:
        """Return the results of the work.

        Args:
            kind: The same for parts that are alike.
            work: Returns new arrays, which are all that it leaves behind, and what is the same for all parts.
            inputs: Arrays that the work may free: it takes them out of this list, which has the only references.
        """
        if self._device is None:
            return work()
        pool, flat = self._device._pool, [array for arrays in inputs or () for array in arrays]
        last, agreed = self._traces.get(kind, (None, False))
        if last is not None and agreed:
            if inputs:
                inputs.clear()
            return last.repeat(pool, flat)
        trace = _Trace(flat)
        del flat
        with self._device.tracing(trace):
            arrays, others = work()
        trace.end(arrays, others)
        self._traces[kind] = trace, trace.like(last)
        return arrays, others
