"""Arrays that are alive at the pool's peak, by the code that made them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from wgrad.device.memory import Block, Lease, Pool


@dataclass(frozen=True)
class Part:
    """Arrays of one maker, dtype and shape, as in `label`, that are alive at the same time."""

    label: str
    number: int
    nbytes: int  # of their blocks together


class CountingPool(Pool):
    """A pool that knows, of each block in use, the `label` under which it was taken."""

    label = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._labels: dict[Block, str] = {}
        self._number: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()
        self._at_peak: list[Part] = []

    def allocate(self, nbytes: int) -> Lease:
        before = self.peak_bytes
        lease = super().allocate(nbytes)
        self._labels[lease.block] = self.label
        self._count(lease.block, 1)
        if self.peak_bytes > before:
            self._at_peak = [Part(label, n, self._nbytes[label]) for label, n in self._number.items() if n]
        return lease

    def _release(self, block: Block) -> None:
        self._count(block, -1)
        super()._release(block)

    def _count(self, block: Block, sign: int) -> None:
        label = self._labels[block]
        self._number[label] += sign
        self._nbytes[label] += sign * block.nbytes

    def at_peak(self) -> list[Part]:
        """Return the arrays at the peak, largest first."""
        return sorted(self._at_peak, key=lambda part: -part.nbytes)
