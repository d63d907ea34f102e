"""Copies in pieces alongside large launches: every byte once, in order with other uses of the arrays, also replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.device.memory import ALIGN
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import transfers

PIECE = 16 * ALIGN  # bytes beside one of the products below
SIDE = 128


@pytest.fixture
def device(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device of this test's own whose products are large enough. named: what it records, in order."""
    device = bind(WgpuDevice)()
    device.shared_memory, device.copies_beside = False, True
    flop = 2.0 * SIDE**3
    monkeypatch.setattr(transfers, "LEAST_WORK", flop)
    monkeypatch.setattr(transfers, "_PASS", ALIGN)
    monkeypatch.setattr(transfers, "_TO_HOST", transfers._Way(1, PIECE / flop))
    monkeypatch.setattr(transfers, "_FROM_HOST", transfers._Way(3, PIECE / flop))
    named, record = list[str](), device._record

    def noted(name: str, dispatch: Any, work: float) -> None:
        copied = "command" if dispatch[0] is None else "piece"
        named.append(copied if name == "transfer" else name)
        record(name, dispatch, work)

    device._record, device.named = noted, named
    yield device
    device.synchronize()


def numbers(nbytes: int, start: int = 0) -> np.ndarray:
    return (np.arange(nbytes // 4, dtype=np.uint32) + start) * np.uint32(2_654_435_761)


class Product:
    """A launch of a large GEMM on its own arrays."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._a, self._b, self._out = (device.upload(np.ones((SIDE, SIDE), np.float32)) for _ in range(3))

    def __call__(self) -> None:
        self._device.gemm(self._a, self._b, out=self._out)


def copies(device: Any) -> list[str]:
    return [name for name in device.named if name in ("piece", "command")]


@pytest.mark.parametrize("nbytes", [16, PIECE - 16, PIECE, PIECE + 16, 3 * PIECE + 48, 4 * 32_768])
@pytest.mark.parametrize("products", [0, 1, 2, 40])
def test_every_byte_is_copied_once_each_way(device: Any, nbytes: int, products: int) -> None:
    multiply = Product(device)
    x, host = device.upload(numbers(nbytes)), device.empty_host((nbytes // 4,), np.uint32)
    beyond = device.upload(numbers(nbytes + 512, 7))  # what lies behind an array is left as it is
    back = device.view(beyond, (nbytes // 4,))
    device.transfer(x, host)
    for _ in range(products):
        multiply()
    np.testing.assert_array_equal(device.download(host), numbers(nbytes))
    device.transfer(host, back)
    for _ in range(products):
        multiply()
    np.testing.assert_array_equal(device.download(back), numbers(nbytes))
    np.testing.assert_array_equal(device.download(beyond)[nbytes // 4 :], numbers(nbytes + 512, 7)[nbytes // 4 :])
    pieces = min(products, -(-nbytes // PIECE))
    expected = ["piece"] * pieces + ["command"] * (pieces * PIECE < nbytes)
    assert copies(device) == 2 * expected


def test_a_piece_opens_the_submission_of_the_launch_beside_it(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no barrier is between the two: what wgpu has to wait for, it waits for before a submission's first."""
    submitted, submit = list[tuple[list[str], bool]](), device._submit

    def noted(submission: Any) -> None:
        submitted.append((submission.names, submission.apart))
        submit(submission)

    monkeypatch.setattr(device, "_submit", noted)
    multiply, host = Product(device), device.empty_host((PIECE // 4,), np.uint32)
    x = device.upload(numbers(PIECE))
    device.synchronize()
    submitted.clear()
    device.zeros((64,))
    device.transfer(x, host)
    device.zeros((64,))
    multiply()
    device.zeros((64,))
    device.flush()
    device.zeros((64,))
    device.synchronize()
    assert [(len(names), apart) for names, apart in submitted] == [(2, False), (3, True), (1, False)]
    (first, second, _), _ = submitted[1]
    assert first == "transfer" and second.startswith("gemm")


def test_what_touches_either_array_finds_it_copied(device: Any) -> None:
    """By a launch that reads the target, one that overwrites the source, a write, and another transfer."""
    size, multiply = 3 * PIECE // 4, Product(device)
    x, host = device.upload(numbers(4 * size)), device.empty_host((size,), np.uint32)
    back, copied = device.empty((size,), np.uint32), device.empty((size,), np.uint32)
    device.transfer(x, host)
    multiply()  # takes one piece of three
    device.copy(device.upload(numbers(4 * size, 5)), x)
    np.testing.assert_array_equal(device.download(host), numbers(4 * size))
    device.transfer(host, back)
    device.transfer(x, host)  # in its turn: `back` has what `host` held before
    multiply()
    device.copy(back, copied)
    np.testing.assert_array_equal(device.download(copied), numbers(4 * size))
    device.write(x, numbers(4 * size, 9))
    np.testing.assert_array_equal(device.download(host), numbers(4 * size, 5))


def test_memory_that_goes_while_its_copy_waits_is_copied_before_it_is_used(device: Any) -> None:
    size, multiply = 3 * PIECE // 4, Product(device)
    host = device.empty_host((size,), np.uint32)
    x = device.upload(numbers(4 * size))
    block, held = x.lease.block, device.memory().in_use_bytes
    device.transfer(x, host)
    del x
    assert device.memory().in_use_bytes < held, "a copy that waits holds no memory"
    multiply()
    other = device.zeros((size,))
    assert other.lease.block is block
    multiply()
    assert copies(device) == ["piece", "command"]
    np.testing.assert_array_equal(device.download(host), numbers(4 * size))
    device.transfer(other, device.empty_host((size,)))
    del other
    device.trim()  # what is given back to the driver is copied before
    assert copies(device) == ["piece", "command", "command"]


def test_only_what_is_touched_is_completed_and_what_came_before_it(device: Any) -> None:
    size, multiply = 2 * PIECE // 4, Product(device)
    arrays = [device.upload(numbers(4 * size, n)) for n in range(3)]
    hosts = [device.empty_host((size,), np.uint32) for _ in range(3)]
    for array, host in zip(arrays, hosts):
        device.transfer(array, host)
    device.copy(arrays[0], arrays[1])
    assert copies(device) == ["command"] * 2
    multiply()
    multiply()
    device.flush()
    assert copies(device) == ["command"] * 2 + ["piece"] * 2
    for n, host in enumerate(hosts):
        np.testing.assert_array_equal(device.download(host), numbers(4 * size, n))


def test_small_arrays_share_a_launch(device: Any) -> None:
    multiply = Product(device)
    parts = [device.upload(numbers(PIECE // 4, n)) for n in range(3)]
    hosts = [device.empty_host((PIECE // 16,), np.uint32) for _ in range(3)]
    for part, host in zip(parts, hosts):
        device.transfer(part, host)
    multiply()
    device.flush()
    assert copies(device) == ["piece"] * 3
    for n, host in enumerate(hosts):
        np.testing.assert_array_equal(device.download(host), numbers(PIECE // 4, n))


def test_a_recording_has_the_pieces(device: Any) -> None:
    size, multiply = 2 * PIECE // 4 + 4, Product(device)
    x, out = device.upload(numbers(4 * size).view(np.float32)), device.empty((size,))
    multiply()

    def work() -> None:
        host = device.empty_host((size,))
        twice = device.scale(x, 2.0)
        device.transfer(twice, host)
        multiply()
        del twice
        device.transfer(host, out)
        multiply()
        multiply()

    with device.capture() as replay:
        work()
    recorded = copies(device)
    assert recorded == ["piece"] * 4 + [
        "command"
    ]  # the third product has the end of one and the beginning of the other
    pieces = [
        [at for at, (name, dispatch) in enumerate(zip(s.names, s.dispatches)) if dispatch[0] and name == "transfer"]
        for s in replay.submissions
    ]
    assert sorted(pieces) == [[], [0], [0], [0, 1]], "each still opens a submission"
    assert [s.apart for s in replay.submissions] == [bool(at) for at in pieces], "and nothing else does"
    for start in (1, 2):
        values = np.arange(size, dtype=np.float32) + start
        device.write(x, values)
        replay.run()
        np.testing.assert_array_equal(device.download(out), 2 * values)
    assert copies(device) == recorded, "a replay records nothing"


def test_a_piece_is_no_larger_than_a_binding(device: Any) -> None:
    multiply, host = Product(device), device.empty_host((PIECE // 4,), np.uint32)
    device._transfers = transfers.Transfers(PIECE // 2 + 4)
    device.transfer(device.upload(numbers(PIECE)), host)
    multiply()
    np.testing.assert_array_equal(device.download(host), numbers(PIECE))
    assert copies(device) == ["piece"] * 2


@pytest.mark.parametrize("groups", [1, 3])
def test_a_piece_may_take_several_turns_of_the_loop(device: Any, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    nbytes = 7 * 32_768 + 4_112  # of 32,768 bytes each, by a workgroup
    monkeypatch.setattr(transfers, "_TO_HOST", transfers._Way(groups, 1.0))
    multiply, host = Product(device), device.empty_host((nbytes // 4,), np.uint32)
    device.transfer(device.upload(numbers(nbytes)), host)
    multiply()
    np.testing.assert_array_equal(device.download(host), numbers(nbytes))
    assert copies(device) == ["piece"]


def test_copies_from_main_memory_that_come_too_late_get_larger_pieces(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they are there in time again. Those that are wanted at once count for nothing."""
    monkeypatch.setattr(transfers, "_FROM_HOST_BEHIND", transfers._Way(5, 2 * transfers._FROM_HOST.bytes_per_flop))
    multiply, host = Product(device), device.empty_host((PIECE,), np.uint32)  # of four pieces
    device.write(host, numbers(4 * PIECE))

    def copied(launches: int) -> list[str]:
        device.named.clear()
        out = device.empty((PIECE,), np.uint32)
        device.transfer(host, out)
        for _ in range(launches):
            multiply()
        np.testing.assert_array_equal(device.download(out), numbers(4 * PIECE))
        return copies(device)

    assert copied(0) == ["command"] and copied(1) == ["piece", "command"]
    assert copied(2) == ["piece"] * 2  # of twice the size
    assert copied(1) == ["piece", "command"]
    for _ in range(12):
        copied(4)
    assert copied(4) == ["piece"] * 4


def test_a_copy_that_is_none_of_pieces_comes_after_those_that_wait(device: Any) -> None:
    host, few = device.empty_host((PIECE // 4,), np.uint32), device.empty((5,), np.uint32)
    device.transfer(device.upload(numbers(PIECE)), host)
    device.transfer(device.view(host, (5,)), few)
    np.testing.assert_array_equal(device.download(few), numbers(20))


@pytest.mark.parametrize("nbytes", [4, 20, PIECE + 8])
def test_what_is_not_a_multiple_of_16_bytes_is_copied_by_a_command(device: Any, nbytes: int) -> None:
    x, host = device.upload(numbers(nbytes)), device.empty_host((nbytes // 4,), np.uint32)
    device.transfer(x, host)
    assert copies(device) == ["command"]
    np.testing.assert_array_equal(device.download(host), numbers(nbytes))


def test_a_dry_run_knows_the_shader(device: Any) -> None:
    dry, multiply = device.dry_run(), Product(device)
    multiply()
    dry.transfer(dry.empty((64,)), dry.empty_host((64,)))
    assert transfers.SHADER in dry.variants
    device.prepare(dry)
    x, compiled = device.zeros((64,)), device.pipelines_compiled()
    device.transfer(x, device.empty_host((64,)))
    multiply()
    assert copies(device) == ["piece"] and device.pipelines_compiled() == compiled


def test_a_software_driver_copies_by_commands(wgpu_device: Any) -> None:
    device = bind(WgpuDevice)()
    assert device.copies_beside == (device.adapter_type == "DiscreteGPU")
