"""Large writes, which go through a few buffers in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import submission_queue
from wgrad.wgsl.runtime.submission_queue import STAGED_BYTES, UPLOAD_BYTES


@pytest.mark.parametrize(
    ("nbytes", "most"),  # 20: behind launches, which the host does not wait for
    [
        (STAGED_BYTES - 4, 6),
        (STAGED_BYTES, 6),
        (UPLOAD_BYTES + 4, 6),
        (9 * UPLOAD_BYTES, 6),
        (11 * UPLOAD_BYTES + 6, 20),
    ],
)
def test_large_writes_go_through_a_few_buffers(
    nbytes: int, most: int, wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order with what is launched before and behind them; what lies behind the array stays."""
    made: list[int] = []
    waits: list[str] = []
    create, wait = wgpu_device._device.create_buffer, submission_queue._Mapping.wait

    def waited(self: Any, queue: Any, doing: str) -> None:
        waits.append(doing)
        asked.add(self)
        wait(self, queue, doing)

    # Until it is waited for, a copy counts as not done, as behind the launches of a real GPU.
    asked, done = set[Any](), set[Any]()
    seen = property(lambda self: self in asked and self in done, lambda self, _: done.add(self))
    monkeypatch.setattr(submission_queue._Mapping, "done", seen)
    monkeypatch.setattr(submission_queue._Mapping, "wait", waited)
    queue = wgpu_device._queue
    monkeypatch.setattr(queue, "_uploads", type(queue._uploads)(queue))

    def noted(**how: Any) -> Any:
        made.append(how["size"])
        return create(**how)

    memory = wgpu_device.zeros((nbytes // 2 + 64,), np.float16)
    array = wgpu_device.view(memory, (nbytes // 2,))
    monkeypatch.setattr(wgpu_device._device, "create_buffer", noted)
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(2):
        values = rng.standard_normal(nbytes // 2).astype(np.float16)
        wgpu_device.flush()
        queue.in_flight.clear()
        if most > 6:
            queue.in_flight.add(queue._thread.submit(lambda: None, lambda: None))
        wgpu_device.write(array, values)
        kept.append((values, wgpu_device.empty(values.shape, np.float16)))
        wgpu_device.copy(array, kept[-1][1])
    pieces = -(-nbytes // UPLOAD_BYTES) * 2 if nbytes >= STAGED_BYTES else 0
    assert made.count(UPLOAD_BYTES) == min(pieces, most)
    assert waits.count("writing to the device") == max(pieces - most, 0)  # a software driver needs none
    for values, copy in kept:
        np.testing.assert_array_equal(wgpu_device.download(copy), values)
    assert not wgpu_device.download(memory)[nbytes // 2 :].any()
