"""Per-kernel times from pairs of events."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from wgrad.hip.runtime.binding import check

_BATCH = 1024  # pairs of events before the times are read


class Profiler:
    """Brackets each launch with events, and sums by kernel name."""

    def __init__(self, hip: Any, stream: Any) -> None:
        self._hip, self._stream = hip, stream
        self._events: list[Any] = []
        self._names: list[str] = []
        self.total_ms: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def before(self, name: str) -> None:
        if len(self._names) == _BATCH:
            self._collect()
        self._names.append(name)
        self._record(2 * len(self._names) - 2)

    def after(self) -> None:
        self._record(2 * len(self._names) - 1)

    def _record(self, at: int) -> None:
        if at == len(self._events):
            self._events.append(check(self._hip.hipEventCreate(), "hipEventCreate"))
        check(self._hip.hipEventRecord(self._events[at], self._stream), "hipEventRecord")

    def _collect(self) -> None:
        if self._names:
            check(self._hip.hipEventSynchronize(self._events[2 * len(self._names) - 1]), "hipEventSynchronize")
        for name, start, end in zip(self._names, self._events[0::2], self._events[1::2]):
            self.total_ms[name] += check(self._hip.hipEventElapsedTime(start, end), "hipEventElapsedTime")
            self.calls[name] += 1
        self._names.clear()

    def table(self) -> str:
        self._collect()
        total = sum(self.total_ms.values()) or 1.0
        lines = [f"{'kernel':<34}{'calls':>8}{'total ms':>12}{'mean us':>11}{'share':>8}"]
        for name, ms in sorted(self.total_ms.items(), key=lambda kv: -kv[1]):
            n = self.calls[name]
            lines.append(f"{name:<34}{n:>8}{ms:>12.3f}{1e3 * ms / n:>11.2f}{100 * ms / total:>7.1f}%")
        lines.append(f"{'all':<34}{sum(self.calls.values()):>8}{total:>12.3f}")
        return "\n".join(lines)
