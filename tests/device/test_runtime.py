"""Common parts of runtimes with a memory pool: arrays, recordings, statistics, the table of profiles, dry runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import DeviceError
from wgrad.device.kernel_times import Profiler
from wgrad.device.memory import MemoryStats, Pool
from wgrad.device.runtime import PooledRuntime, Recording


class Clock(Profiler):
    """Every launch takes 1,000 ns more than the one before."""

    def launch(self, name: str) -> None:
        self._names.append(name)

    def _times(self) -> Iterable[float]:
        return [1000.0 * (i + 1) for i in range(len(self._names))]


class Host(PooledRuntime):
    """Memory of the host; notes what is asked of it."""

    def __init__(self) -> None:
        self._pool, self._host_pool = (Pool(bytearray, lambda block: None) for _ in range(2))
        self.words: list[int] = []
        self.flushes = 0

    def _fill_words(self, out: Any, word: int) -> None:
        self.words.append(word)

    def _write_new(self, array: Any, host: np.ndarray) -> None:
        array.lease.block.buffer[: host.nbytes] = host.tobytes()

    def flush(self) -> None:
        self.flushes += 1

    def _new_replay(self) -> Recording:
        return Recording(self)

    def _new_profiler(self) -> Clock:
        return Clock()


@pytest.mark.parametrize("kind", [Host, DryRuntime, ReferenceDevice])
def test_every_device_refuses_int64_in_the_same_words(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"upload: int64 is not a device dtype \(array of shape \(2, 3\)\); convert"):
        kind().upload(np.zeros((2, 3), np.int64))


def test_a_view_shares_memory_at_its_offset() -> None:
    device = Host()
    x = device.upload(np.arange(128, dtype=np.float16))
    part = device.view(x, (2, 32), 64)
    assert part.lease is x.lease and part.offset == 128 and part.shape == (2, 32) and part.dtype == np.float16
    assert bytes(x.lease.block.buffer[128:130]) == np.float16(64).tobytes()


@pytest.mark.parametrize(
    ("dtype", "value", "word"),
    [(np.float32, 1.5, 0x3FC00000), (np.float16, 1.5, 0x3E003E00), (ml_dtypes.bfloat16, 1.5, 0x3FC03FC0)],
)
def test_fill_repeats_the_bits_of_the_dtype(dtype: Any, value: float, word: int) -> None:
    device = Host()
    device.fill(device.zeros((4,), dtype), value)
    assert device.words == [0, word]


@pytest.mark.parametrize("kind", [Host, DryRuntime, ReferenceDevice])
def test_every_device_counts_its_memory(kind: type[Any]) -> None:
    device = kind()
    x = device.upload(np.zeros(1000, np.float32))
    y = device.upload(np.zeros(3000, np.float32))
    held = device.memory()
    assert isinstance(held, MemoryStats) and held.in_use_bytes == held.peak_bytes >= 16_000
    del y
    assert device.memory().in_use_bytes < held.in_use_bytes == device.memory().peak_bytes
    if isinstance(device, PooledRuntime):
        assert device.trim() > 0 and device.memory().reserved_bytes < device.memory().peak_reserved_bytes
    device.reset_peak()
    after = device.memory()
    assert after.in_use_bytes == after.peak_bytes >= 4000 and x is not None
    assert after.peak_reserved_bytes == after.reserved_bytes


def test_a_recording_keeps_what_is_from_outside_and_only_that() -> None:
    device = Host()
    x = device.empty((64,))
    with device.capture() as recording:
        y = device.empty((64,))
        device._keep([x, None, y])
        with pytest.raises(DeviceError, match="capture"):
            device.capture().__enter__()
    assert recording._leases == {x.lease} and device.flushes == 2
    scratch = y.lease.block
    del y
    assert device.empty((64,)).lease.block is not scratch, "a replay writes there"
    with device.capture():
        assert device.empty((64,)).lease.block is scratch


def test_an_error_ends_the_recording() -> None:
    device = Host()
    with pytest.raises(KeyError), device.capture():
        raise KeyError
    with device.capture():
        pass


def test_a_profile_table_sums_calls_by_kernel() -> None:
    device = Host()
    assert device.profile_table() == ""
    assert device.profile()
    for name in ("gemm", "silu", "gemm"):
        device.profiler.launch(name)
    table = device.profile_table()
    device.profiler.launch("silu")  # what is measured later is added
    assert table.splitlines() == [
        "kernel                               calls    total ms    mean us   share",
        "gemm                                     2       0.004       2.00   66.7%",
        "silu                                     1       0.002       2.00   33.3%",
        "all                                      3       0.006",
    ]
    assert device.profile_times() == {"gemm": 4000.0, "silu": 3000.0}
    assert [line.split()[1] for line in device.profile_table().splitlines()[1:]] == ["2", "2", "4"]
    device.profile(False)
    assert device.profile_table() == "" and device.profile_times() == {}


def test_a_dry_run_moves_nothing_and_gives_zeros() -> None:
    device = DryRuntime()
    with device.capture() as replay:
        x = device.upload(np.ones((3, 5), np.float16))
    device.write(x, np.ones((3, 5), np.float16))
    replay.run()
    device.synchronize()
    for host in (device.download(x), device.readback(x).result()):
        assert host.shape == (3, 5) and host.dtype == np.float16 and not host.any()
    out = np.ones((3, 5), np.float16)
    assert device.readback(x, out).result() is out and not out.any()
    assert device.readback(x).ready() and replay.dispatches == device.pipelines_compiled() == 0
