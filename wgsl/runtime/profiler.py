"""Per-kernel times from timestamp queries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.wgsl.runtime import native

_BATCH = 1024  # dispatches between two read-backs; two timestamps each, a query set holds 4096


class Profiler:
    """Submits each dispatch in a pass with a timestamp at its start and end, and sums by kernel name."""

    def __init__(self, device: Any, queue: native.Queue) -> None:
        if "timestamp-query" not in device.features:
            raise DeviceError("this device has no timestamp-query, which a profile needs; run without --profile")
        self._device, self._queue = device, queue
        self._queries = device.create_query_set(type="timestamp", count=2 * _BATCH)
        self._resolve = device.create_buffer(size=16 * _BATCH, usage="QUERY_RESOLVE|COPY_SRC")
        self._names: list[str] = []
        self.total_ns: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def submit(self, chunk: list[native.Dispatch], names: list[str]) -> None:
        if len(self._names) + len(names) > _BATCH:
            self._collect()
        encoder = self._device.create_command_encoder()
        for (pipeline, bind_group, x, y, z), name in zip(chunk, names):
            at = 2 * len(self._names)
            timed = encoder.begin_compute_pass(
                timestamp_writes={
                    "query_set": self._queries,
                    "beginning_of_pass_write_index": at,
                    "end_of_pass_write_index": at + 1,
                }
            )
            native.record(timed, pipeline, bind_group, x, y, z)
            timed.end()
            self._names.append(name)
        self._device.queue.submit([encoder.finish()])

    def _collect(self) -> None:
        if not self._names:
            return
        encoder = self._device.create_command_encoder()
        encoder.resolve_query_set(self._queries, 0, 2 * len(self._names), self._resolve, 0)
        self._device.queue.submit([encoder.finish()])
        ticks = np.frombuffer(self._device.queue.read_buffer(self._resolve), np.uint64)[: 2 * len(self._names)]
        for name, start, end in zip(self._names, ticks[0::2].astype(np.int64), ticks[1::2].astype(np.int64)):
            self.total_ns[name] += max(0, int(end - start))
            self.calls[name] += 1
        self._names.clear()

    def table(self) -> str:
        self._collect()
        total = sum(self.total_ns.values()) or 1.0
        lines = [f"{'kernel':<34}{'calls':>8}{'total ms':>12}{'mean us':>11}{'share':>8}"]
        for name, ns in sorted(self.total_ns.items(), key=lambda kv: -kv[1]):
            n = self.calls[name]
            lines.append(f"{name:<34}{n:>8}{ns / 1e6:>12.3f}{ns / 1e3 / n:>11.2f}{100 * ns / total:>7.1f}%")
        lines.append(f"{'all':<34}{sum(self.calls.values()):>8}{total / 1e6:>12.3f}")
        return "\n".join(lines)
