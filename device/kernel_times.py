"""Times of kernels, and the table of a profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable

BATCH = 1024  # launches between two readings of their times


class Profiler(ABC):
    """Sums the times of launches by kernel. A device package times up to BATCH launches, then reads the times."""

    def __init__(self) -> None:
        self._names: list[str] = []  # kernels of the launches whose times have not been read
        self.total_ns: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    @abstractmethod
    def _times(self) -> Iterable[float]:
        """Wait for the launches of `_names` (at least one), and return the nanoseconds of each."""

    def collect(self) -> None:
        if self._names:
            for name, ns in zip(self._names, self._times(), strict=True):
                self.total_ns[name] += ns
                self.calls[name] += 1
        self._names.clear()

    def table(self) -> str:
        """Return a table of calls, total and mean time, and share of each kernel, the longest first."""
        self.collect()
        total = sum(self.total_ns.values()) or 1.0
        lines = [f"{'kernel':<34}{'calls':>8}{'total ms':>12}{'mean us':>11}{'share':>8}"]
        for name, ns in sorted(self.total_ns.items(), key=lambda kv: -kv[1]):
            n = self.calls[name]
            lines.append(f"{name:<34}{n:>8}{ns / 1e6:>12.3f}{ns / 1e3 / n:>11.2f}{100 * ns / total:>7.1f}%")
        lines.append(f"{'all':<34}{sum(self.calls.values()):>8}{total / 1e6:>12.3f}")
        return "\n".join(lines)
