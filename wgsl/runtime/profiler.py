"""Per-kernel times from timestamp queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from wgrad.device import kernel_times
from wgrad.device.errors import DeviceError
from wgrad.device.kernel_times import BATCH
from wgrad.wgsl.runtime import native
from wgrad.wgsl.runtime.submission_queue import Queue

# A query set holds 4096 timestamps; a dispatch has two.


class Profiler(kernel_times.Profiler):
    """Submits each dispatch in a pass with a timestamp at its start and end, and sums by kernel name."""

    def __init__(self, device: Any, queue: Queue) -> None:
        if "timestamp-query" not in device.features:
            raise DeviceError("this device has no timestamp-query, which a profile needs; run without --profile")
        super().__init__()
        self._device, self._queue = device, queue
        self._queries = device.create_query_set(type="timestamp", count=2 * BATCH)
        self._resolve = device.create_buffer(size=16 * BATCH, usage="QUERY_RESOLVE|COPY_SRC")

    def submit(self, chunk: list[native.Dispatch], names: list[str]) -> None:
        if len(self._names) + len(names) > BATCH:
            self.collect()
        encoder = self._device.create_command_encoder()
        for (pipeline, bind_group, x, y, z), name in zip(chunk, names):
            if pipeline is None:
                native.copy(native.handle(encoder), bind_group, x, y, z)  # no pass, and so no time
                continue
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
        self._submit(encoder)

    def _submit(self, encoder: Any) -> None:
        self._queue.submit_encoder(native.disown(encoder), "submitting commands")

    def _times(self) -> Iterable[float]:
        encoder = self._device.create_command_encoder()
        encoder.resolve_query_set(self._queries, 0, 2 * len(self._names), self._resolve, 0)
        self._submit(encoder)
        ticks = np.empty(2 * len(self._names), np.int64)
        self._queue.read_later(self._resolve, 0, ticks.nbytes).copy_to(ticks.view(np.uint8).data)
        result: Iterable[float] = np.maximum(0, np.diff(ticks.reshape(-1, 2))[:, 0]).tolist()
        return result
