"""The wgpu runtime: memory pool, transfers, views, recording and replay, errors, and profiles."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wgrad.autograd.bind import bind
from wgrad.autograd.replay import Recorded
from wgrad.device.errors import DeviceError, OutOfMemory, TooLarge
from wgrad.device.memory import ALIGN, Pool, size_class
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import adapters, runtime, submission_size
from wgrad.wgsl.runtime.compile import Compiler, Pipeline, Variant
from wgrad.wgsl.runtime.runtime import MAX_GROUPS
from wgrad.wgsl.runtime.submission_size import FIRST_DISPATCHES, MAX_DISPATCHES, Submission, SubmissionSize, joined

Seen = Callable[..., SubmissionSize]


@pytest.fixture
def fresh(wgpu_device: WgpuDevice) -> WgpuDevice:
    """Return a new device, whose pool is empty."""
    return bind(WgpuDevice)()


# ---- pool --------------------------------------------------------------------------------
@given(st.integers(0, 1 << 40))
def test_a_block_holds_its_array_and_little_more(nbytes: int) -> None:
    block = size_class(nbytes)
    assert block >= nbytes and block % ALIGN == 0
    assert block <= max(nbytes * 1.125 + ALIGN, ALIGN)
    assert size_class(block) == block


def test_freed_memory_is_used_again(fresh: WgpuDevice) -> None:
    def step() -> None:
        arrays = [fresh.zeros((n,)) for n in (1000, 70_000, 5, 333_333)]
        fresh.add(arrays[1], arrays[1])

    step()
    before = fresh.memory()
    for _ in range(20):
        step()
    after = fresh.memory()
    assert after.reserved_bytes == before.reserved_bytes
    assert after.in_use_bytes == before.in_use_bytes
    assert after.peak_bytes == before.peak_bytes


def test_memory_statistics_count_blocks_and_gaps(fresh: WgpuDevice) -> None:
    start = fresh.memory()
    small, large = fresh.empty((1 << 18,)), fresh.empty((3 << 18,))
    assert fresh.memory().in_use_bytes == start.in_use_bytes + (4 << 20)
    assert fresh.memory().fragmentation == 0.0  # nothing is free
    del small
    assert fresh.memory().fragmentation == 0.0  # one free block
    del large
    found = fresh.memory()
    assert found.in_use_bytes == start.in_use_bytes
    assert found.peak_bytes == start.in_use_bytes + (4 << 20)
    assert found.fragmentation == pytest.approx(0.25)  # 1 MiB and 3 MiB free
    fresh.reset_peak()
    assert fresh.memory().peak_bytes == start.in_use_bytes
    assert fresh.trim() == 4 << 20
    assert fresh.memory().reserved_bytes == start.reserved_bytes


def test_a_full_device_gives_back_free_blocks_before_it_fails() -> None:
    capacity, held = 1 << 20, 0

    def create(nbytes: int) -> int:
        nonlocal held
        if held + nbytes > capacity:
            raise OutOfMemory("full")
        held += nbytes
        return nbytes

    def destroy(block) -> None:
        nonlocal held
        held -= block.nbytes

    pool = Pool(create, destroy)
    first = pool.allocate(700 << 10)
    del first
    second = pool.allocate(1 << 20)  # does not fit beside the free block, which goes first
    assert held == pool.reserved_bytes == 1 << 20
    with pytest.raises(OutOfMemory, match="full"):
        pool.allocate(256)
    assert pool.in_use_bytes == second.block.nbytes


# ---- transfers and views -------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1003])
def test_a_round_trip(size, dtype, wgpu_device) -> None:
    host = (np.arange(size) % 100).astype(dtype)
    array = wgpu_device.upload(host)
    assert (array.shape, array.dtype, array.size) == ((size,), np.dtype(dtype), size)
    np.testing.assert_array_equal(wgpu_device.download(array), host)
    wgpu_device.write(array, host[::-1])  # not contiguous
    np.testing.assert_array_equal(wgpu_device.download(array), host[::-1])


def test_shapes_survive(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    for shape in ((), (1, 1), (3, 1, 5), (2, 0, 4)):
        host = rng.standard_normal(shape).astype(np.float32)
        found = wgpu_device.download(wgpu_device.upload(host))
        np.testing.assert_array_equal(found, host)
        assert found.shape == shape


def test_views_share_storage(wgpu_device: WgpuDevice) -> None:
    whole = wgpu_device.upload(np.arange(256, dtype=np.float32))
    part = wgpu_device.view(whole, (8, 8), 64)
    np.testing.assert_array_equal(wgpu_device.download(part).reshape(-1), np.arange(64, 128))
    wgpu_device.fill(part, -1.5)
    wanted = np.arange(256, dtype=np.float32)
    wanted[64:128] = -1.5
    np.testing.assert_array_equal(wgpu_device.download(whole), wanted)
    inner = wgpu_device.view(wgpu_device.view(whole, (192,), 64), (3,), 64)
    np.testing.assert_array_equal(wgpu_device.download(inner), [128, 129, 130])
    del whole  # a view keeps the memory
    np.testing.assert_array_equal(wgpu_device.download(part), np.full((8, 8), -1.5))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [1, 7, 1024, 40_003])
def test_zeros_and_fill_write_every_element(size, dtype, wgpu_device, narrow) -> None:
    for device in (wgpu_device, narrow):
        array = device.zeros((size,), dtype)
        assert not device.download(array).any()
        device.fill(array, -2.5)
        assert (device.download(array) == -2.5).all()


def test_a_write_waits_for_work_recorded_before_it(wgpu_device: WgpuDevice) -> None:
    x = wgpu_device.upload(np.ones(1003, np.float32))
    doubled = wgpu_device.add(x, x)
    wgpu_device.write(x, np.full(1003, 5, np.float32))
    again = wgpu_device.add(x, x)
    assert (wgpu_device.download(doubled) == 2).all() and (wgpu_device.download(again) == 10).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float16])
@pytest.mark.parametrize("size", [1, 3, 7, 1023])
def test_writes_and_fills_leave_the_neighbors_alone(size, dtype, wgpu_device) -> None:
    wide = (1 + np.arange(size + 9) % 100).astype(dtype)
    memory = wgpu_device.upload(wide)
    part = wgpu_device.view(memory, (size,))
    wgpu_device.write(part, np.zeros(size, dtype))
    np.testing.assert_array_equal(wgpu_device.download(memory)[size:], wide[size:])
    assert not wgpu_device.download(part).any()
    if dtype == np.float16:
        wgpu_device.fill(part, 3.0)
        np.testing.assert_array_equal(wgpu_device.download(memory)[size:], wide[size:])
        assert (wgpu_device.download(part) == 3).all()


def test_int64_is_refused(wgpu_device: WgpuDevice) -> None:
    with pytest.raises(ValueError, match=r"int64 is not a device dtype \(array of shape \(2, 3\)\); convert it"):
        wgpu_device.upload(np.zeros((2, 3), np.int64))


# ---- launches ------------------------------------------------------------------------------
def lengths(replay: Any) -> list[int]:
    """Return the number of dispatches of each submission."""
    return [len(submission.dispatches) for submission in replay.submissions]


def test_order_holds_over_many_submissions(wgpu_device: WgpuDevice) -> None:
    x, one = wgpu_device.zeros((67,)), wgpu_device.upload(np.ones(67, np.float32))
    for _ in range(3 * MAX_DISPATCHES + 5):
        wgpu_device.add(x, one, out=x)
    assert (wgpu_device.download(x) == 3 * MAX_DISPATCHES + 5).all()


def test_the_first_submission_is_short(wgpu_device: WgpuDevice) -> None:
    """The device waits for it, but each submission costs time on the host."""
    x, y = wgpu_device.zeros((67,)), wgpu_device.zeros((67,))
    for _ in range(2):
        with wgpu_device.capture() as replay:
            for _ in range(FIRST_DISPATCHES + 2 * MAX_DISPATCHES + 3):
                wgpu_device.add(x, y, out=x)
        assert lengths(replay) == [FIRST_DISPATCHES, MAX_DISPATCHES, MAX_DISPATCHES, 3]


def test_a_submission_ends_after_so_much_work(wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers' watchdogs allow two seconds for a submission. A launch of more work is alone in one."""
    x, ended, submit = wgpu_device.zeros((64,)), list[int](), wgpu_device._submit

    def submitted(submission: Submission) -> None:
        ended.append(len(submission.dispatches))
        submit(submission)

    wgpu_device.synchronize()
    monkeypatch.setattr(wgpu_device, "_submit", submitted)
    monkeypatch.setattr(wgpu_device._submission_size, "work", 10.0)
    for work in (4.0, 4.0, 4.0, 12.0, 4.0):
        wgpu_device.launch("fill", [x], [64, 0, 0], (1, 1, 1), work=work)
    wgpu_device.flush()
    assert ended == [2, 1, 1, 1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A function that returns the size after steps, each of (work, seconds), on a device of this kind."""
    now = [0.0]
    monkeypatch.setattr(submission_size, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def after(
        *steps: tuple[float, float],
        kind: str = "DiscreteGPU",
        kept: Path | None = None,
        size: SubmissionSize | None = None,
    ) -> SubmissionSize:
        size = size or SubmissionSize(kind, kept)
        for work, seconds in steps:
            if work:
                size.submitted(work / 2)
                size.submitted(work / 2)
            now[0] += seconds
            size.waited()
        return size

    return after


def test_a_submission_is_what_the_device_does_in_50_ms(seen: Seen) -> None:
    """Each costs time on the host. The rate is measured between a submission and a wait, if there is enough work."""

    def after(*steps: tuple[float, float], kind: str = "DiscreteGPU") -> float:
        return seen(*steps, kind=kind).work

    least = after()
    assert least > after(kind="IntegratedGPU") > after(kind="CPU")
    assert after((1e12, 0.125)) == after((0.0, 8.0), (1e12, 0.125)) == 4e11
    assert after((1e12, 8.0)) == after((0.75 * least, 0.001)) == least
    assert after((1e12, 0.125), (1e12, 0.5)) == 4e11  # once seen
    assert after((1e12, 0.125), (1e12, 0.125)) == 4e11  # each by itself
    assert after((1e12, 0.001)) == after((1e14, 0.125)) == 2e12  # enough
    assert after((2e10, 0.5), kind="CPU") == after(kind="CPU") and after((2e10, 0.125), kind="CPU") == 8e9


def test_a_dispatch_may_take_200_ms(seen: Seen) -> None:
    """On a software driver it may take as long as it likes."""
    assert seen().dispatch_work == 1e11 and seen((1e12, 8.0)).dispatch_work == 1e11
    assert seen((1e12, 0.125)).dispatch_work == 1.6e12 and seen((1e14, 0.125)).dispatch_work == 1.6e14
    assert seen(kind="CPU").dispatch_work == seen((2e10, 0.5), kind="CPU").dispatch_work == math.inf


def test_the_rate_of_a_device_is_kept_for_other_processes(seen: Seen, tmp_path: Path) -> None:
    """Not that of a software driver. A file that holds no rate counts as none."""
    file = tmp_path / "rates" / "gpu.json"
    seen((1e12, 0.125), kind="CPU", kept=file)
    assert not file.exists()
    seen((1e12, 0.125), kept=file)
    assert json.loads(file.read_bytes())["rate"] == 8e12
    assert (seen(kept=file).work, seen(kept=file).dispatch_work) == (4e11, 1.6e12)
    seen((1e12, 0.5), kept=file)
    assert json.loads(file.read_bytes())["rate"] == 8e12
    for text in (
        "",
        "[]",
        '{"format": 1, "rate": 1e99}',
        '{"format": 1, "rate": "NaN"}',
        '{"format": 9, "rate": 8e12}',
    ):
        file.write_text(text)
        assert (seen(kept=file).work, seen(kept=file).dispatch_work) == (seen().work, 1e11), text


def test_a_device_that_was_lost_gets_a_share_of_its_work(seen: Seen) -> None:
    size = seen((1e12, 0.125))
    size.lower(0.5)
    assert (size.work, size.dispatch_work) == (2e11, 8e11)
    seen((1e12, 0.0625), size=size)
    assert (size.work, size.dispatch_work) == (4e11, 1.6e12)


def test_a_recording_has_submissions_of_the_size_that_was_seen(
    wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording's own rate counts, since earlier work may include compilation. The first one stays short."""
    x, size, clock = wgpu_device.zeros((64,)), wgpu_device._submission_size, count(0.0, 1e-3)
    monkeypatch.setattr(submission_size, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    wgpu_device.synchronize()
    before = size.work, size.rate
    try:
        size.work, size.rate = 10.0, 0.0
        with wgpu_device.capture() as replay:
            for value in range(7):
                wgpu_device.launch("fill", [x], [64, value, 0], (1, 1, 1), work=6.0)
        assert size.work > 1000 and lengths(replay) == [1, 6]
        wgpu_device.fill(x, 9)
        replay.run()
        assert (wgpu_device.download(x).view(np.uint32) == 6).all()
    finally:
        size.work, size.rate = before


def test_the_time_to_compile_is_not_the_device_s(wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is the time before a recording's first run: a new machine was taken for a slow one, and its GEMMs were
    split."""
    x, size, now = wgpu_device.zeros((64,)), SubmissionSize("DiscreteGPU"), [0.0]
    monkeypatch.setattr(submission_size, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(wgpu_device, "_submission_size", size)
    monkeypatch.setattr(wgpu_device._compiler, "_pipelines", dict(wgpu_device._compiler._pipelines))
    make = wgpu_device._compiler.make

    def slow(variant: Variant) -> Pipeline:
        now[0] += 30.0
        return make(variant)

    monkeypatch.setattr(wgpu_device._compiler, "make", slow)

    def work(**constants: bool) -> None:
        wgpu_device.launch("fill", [x], [64, 1, 0], (1, 1, 1), constants, work=1e12)
        now[0] += 0.125

    def several() -> None:
        for other in (False, False, True):
            work(OTHER=other)

    work(OTHER=False)
    for run in (partial(work, OTHER=False), several):
        now[0] += 30.0  # a model is loaded, say
        Recorded(wgpu_device)(run)
        wgpu_device.synchronize()
        assert size.rate == 8e12
        size.rate = 0.0


def test_submissions_are_joined() -> None:
    def of(*sizes: tuple[int, float, bool], work: float) -> list[list[int]]:
        numbers, given = iter(range(10_000)), []
        for length, flop, apart in sizes:
            mine = [next(numbers) for _ in range(length)]
            given.append(Submission(mine, [f"n{n}" for n in mine], flop, apart))
        result = joined(given, work)
        assert [n for s in result for n in s.dispatches] == list(range(sum(length for length, _, _ in sizes)))
        assert all(s.names == [f"n{n}" for n in s.dispatches] for s in result)
        assert sum(s.work for s in result) == sum(flop for _, flop, _ in sizes)
        return [[len(s.dispatches), int(s.apart)] for s in result]

    five = [(3, 1.0, False)] * 5
    assert of(work=9.0) == [] and of(five[0], work=9.0) == [[3, 0]]
    assert of(*five, work=9.0) == [[3, 0], [12, 0]]
    assert of(*five, work=2.0) == [[3, 0], [6, 0], [6, 0]] and of(*five, work=1.9) == [[3, 0]] * 5
    assert of(*five[:3], (2, 1.0, True), *five[:2], work=9.0) == [[3, 0], [6, 0], [8, 1]]  # a copy begins one
    half = (MAX_DISPATCHES // 2, 1.0, False)
    assert of(half, half, half, (1, 1.0, False), work=9.0) == [[half[0], 0], [MAX_DISPATCHES, 0], [1, 0]]


def test_more_workgroups_than_one_dimension_holds_are_dispatched(
    wgpu_device: WgpuDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "MAX_GROUPS", 65)  # 65,535 take a software driver five seconds
    rows = 2 * 65 + 41  # one workgroup each
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    y = wgpu_device.download(wgpu_device.softmax(wgpu_device.upload(x))).astype(np.float64)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), atol=1e-6)


def test_groups_cover_all_items() -> None:
    for items in (1, 255, 256, 257, 65_535 * 256, 65_535 * 256 + 1, 1 << 31):
        x, y, z = WgpuDevice.groups(items, 256)
        assert z == 1 and max(x, y) <= MAX_GROUPS and x * y * 256 >= items
        assert x * y - -(-items // 256) < y  # less than one turn of the second dimension is idle


def test_a_launch_beyond_a_limit_says_which(wgpu_device: WgpuDevice, narrow: WgpuDevice) -> None:
    x = wgpu_device.zeros((64,))
    with pytest.raises(TooLarge, match="fill: a dispatch of .* exceeds 65535"):
        wgpu_device.launch("fill", [x], [64, 0], (MAX_GROUPS + 1, 1, 1))
    large = narrow.empty((narrow.max_binding_bytes // 4 + 1,))
    with pytest.raises(TooLarge, match=r"fill: an array of 65,540 bytes does not fit one binding .*\(65,536\)"):
        narrow.launch("fill", [large], [1, 0], (1, 1, 1))
    with pytest.raises(TooLarge, match="64 rows of 4,012 bytes do not fit one binding of 65,536 bytes"):
        narrow.softmax(narrow.empty((70, 1003)))


def test_a_compile_error_names_shader_and_variant(wgpu_device: WgpuDevice) -> None:
    x = wgpu_device.zeros((64,))
    compiled = wgpu_device.pipelines_compiled()
    with pytest.raises(
        DeviceError, match=r"(?s)elementwise_copy\.wgsl \(main; W_T=nonsense\) does not compile.*nonsense"
    ):
        wgpu_device.launch("elementwise_copy", [x, x], [1, 0], (1, 1, 1), {"W_T": "nonsense"})
    assert wgpu_device.pipelines_compiled() == compiled
    wgpu_device.synchronize()  # the error is not raised a second time


def test_a_compile_error_names_the_line_of_the_source(wgpu_device: WgpuDevice, tmp_path: Path) -> None:
    head = "// A comment.\n@group(0) @binding(0) var<uniform> n: vec4<u32>;\n"
    text = head + "#if SOME\nfn f() -> u32 { return nobody; }\n#endif\n@compute @workgroup_size(1)\nfn main() {}\n"
    (tmp_path / "bad.wgsl").write_text(text, encoding="utf-8")
    with pytest.raises(DeviceError, match=r"does not compile on this device \(bad\.wgsl:4\): (?s:.*)nobody"):
        wgpu_device.launch(str(tmp_path / "bad"), [], [1, 0, 0, 0], (1, 1, 1), {"SOME": True})
    wgpu_device.synchronize()


def test_assembled_shaders_are_written_where_asked(
    wgpu_device: WgpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGRAD_DUMP_SHADERS", str(tmp_path / "dump"))
    Compiler(wgpu_device._device).get("fill", "main", {})
    (written,) = (tmp_path / "dump").iterdir()
    assert written.name.startswith("fill-main-") and "fn main(" in written.read_text(encoding="utf-8")


def test_out_of_memory_says_how_much(wgpu_device: WgpuDevice) -> None:
    gc.collect()  # what earlier tests left in cycles goes at any moment
    before = wgpu_device.memory().in_use_bytes
    with pytest.raises(OutOfMemory, match=r"an array of [\d,]+ bytes is larger than one buffer may be on .*\)$"):
        wgpu_device.empty((wgpu_device.max_buffer_bytes // 4 + 64,))
    assert wgpu_device.memory().in_use_bytes == before


def test_a_refused_allocation_is_out_of_memory(fresh: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    held = fresh.empty((1000,))

    def refuse(**_: object) -> None:
        raise RuntimeError("driver says no")

    monkeypatch.setattr(fresh._device, "create_buffer", refuse)
    with pytest.raises(OutOfMemory, match=r"no memory for 4,194,304 bytes on .*in use.*reserved .driver says no.$"):
        fresh.empty((1 << 20,))
    monkeypatch.undo()
    assert fresh.empty((1 << 20,)).size == 1 << 20  # and the device goes on
    assert held.size == 1000


def test_wrong_adapters_are_named(wgpu_device: WgpuDevice) -> None:
    names = [a["name"] for a in adapters.list_adapters()]
    with pytest.raises(DeviceError, match="no such card") as caught:
        bind(WgpuDevice)("no such card")
    assert all(name in str(caught.value) for name in names)
    with pytest.raises(DeviceError, match=f"'wgpu:{len(names)}' matches no adapter"):
        bind(WgpuDevice)(str(len(names)))
    assert names[0] in bind(WgpuDevice)(names[0][:6].upper()).description


# ---- recording -----------------------------------------------------------------------------
def step(device: WgpuDevice, x, weight):
    """Run a step that needs scratch memory: two norms in a row, and their reductions."""
    y, _ = device.rms_norm(x, weight, 1e-5)
    y = device.add(device.swiglu(y, x), x)
    return device.sum_rows(y)


def test_a_replay_does_the_same_work_on_new_values(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    values = [rng.standard_normal((43, 72)).astype(np.float32) for _ in range(3)]
    x, weight = wgpu_device.upload(values[0]), wgpu_device.upload(np.ones(72, np.float32))
    with wgpu_device.capture() as replay:
        out = step(wgpu_device, x, weight)
    first = wgpu_device.download(out)  # it also ran
    assert replay.dispatches >= 4
    compiled = wgpu_device.pipelines_compiled()
    for value in values[1:]:
        wgpu_device.write(x, value)
        replay.run()
        wanted = wgpu_device.download(step(wgpu_device, wgpu_device.upload(value), weight))
        np.testing.assert_array_equal(wgpu_device.download(out), wanted)
        assert (wanted != first).any()
    assert wgpu_device.pipelines_compiled() == compiled


def test_a_replay_writes_to_nobody_elses_memory(fresh: WgpuDevice, rng: np.random.Generator) -> None:
    """Scratch freed within a recording belongs to the replay: later arrays must not get it."""
    x = fresh.upload(rng.standard_normal((43, 72)).astype(np.float32))
    weight = fresh.upload(np.ones(72, np.float32))
    step(fresh, x, weight)  # leaves free blocks of just these sizes, which the recording takes
    with fresh.capture() as replay:
        out = step(fresh, x, weight)
    wanted = fresh.download(out)
    others = [fresh.empty((43, 72)) for _ in range(8)] + [fresh.empty((72,)) for _ in range(8)]
    for i, other in enumerate(others):
        fresh.fill(other, float(i))
    replay.run()
    for i, other in enumerate(others):
        assert (fresh.download(other) == i).all()
    np.testing.assert_array_equal(fresh.download(out), wanted)


def test_two_replays_may_share_scratch(fresh: WgpuDevice, rng: np.random.Generator) -> None:
    """A second recording reuses the scratch of the first one, which holds nothing between replays."""
    weight = fresh.upload(np.ones(72, np.float32))
    xs = [fresh.upload(rng.standard_normal((430, 72)).astype(np.float32)) for _ in range(2)]
    outs = [fresh.zeros((72,)) for _ in xs]
    replays, reserved = [], []
    for x, out in zip(xs, outs):
        with fresh.capture() as replay:
            fresh.copy(step(fresh, x, weight), out)
        replays.append(replay)
        reserved.append(fresh.memory().reserved_bytes)
    assert reserved[1] == reserved[0]
    wanted = [fresh.download(out) for out in outs]
    for out in outs:
        fresh.fill(out, 0.0)
    for replay in (*replays, *reversed(replays)):
        replay.run()
    for out, value in zip(outs, wanted):
        np.testing.assert_array_equal(fresh.download(out), value)


def test_a_replay_outlives_a_trim(fresh: WgpuDevice, rng: np.random.Generator) -> None:
    x, weight = fresh.upload(rng.standard_normal((43, 72)).astype(np.float32)), fresh.upload(np.ones(72, np.float32))
    with fresh.capture() as replay:
        out = step(fresh, x, weight)
    wanted = fresh.download(out)
    spare = fresh.empty((1 << 20,))
    del spare
    assert fresh.trim() >= 4 << 20
    fresh.fill(out, 0.0)
    replay.run()
    np.testing.assert_array_equal(fresh.download(out), wanted)


def test_a_replay_keeps_the_arrays_that_it_reads(fresh: WgpuDevice) -> None:
    """An input without other references must neither be freed nor reused."""
    x = fresh.upload(np.full(1 << 18, 3, np.float32))
    start = fresh.memory().in_use_bytes
    with fresh.capture() as replay:
        out = fresh.add(x, x)
    del x
    fresh.trim()
    others = [fresh.zeros((1 << 18,)) for _ in range(3)]
    fresh.fill(out, 0.0)
    replay.run()
    assert (fresh.download(out) == 6).all()
    del others, out, replay
    assert fresh.memory().in_use_bytes == start - (1 << 20)  # and with the replay its hold on x goes


def test_a_recording_inside_a_recording_is_refused(wgpu_device: WgpuDevice) -> None:
    with wgpu_device.capture():
        with pytest.raises(DeviceError, match="inside capture"):
            with wgpu_device.capture():
                pass
    with wgpu_device.capture() as replay:  # and the first one has ended properly
        wgpu_device.zeros((5,))
    assert replay.dispatches == 1


def test_an_error_while_recording_ends_the_recording(wgpu_device: WgpuDevice) -> None:
    with pytest.raises(KeyError), wgpu_device.capture():
        raise KeyError("stop")
    with wgpu_device.capture() as replay:
        wgpu_device.zeros((5,))
    assert replay.dispatches == 1


# ---- profile -------------------------------------------------------------------------------
def test_profile_counts_calls_by_kernel(fresh: WgpuDevice, rng: np.random.Generator) -> None:
    if "timestamp-query" not in fresh._device.features:
        pytest.skip("the device has no timestamp-query")
    assert fresh.profile_table() == ""
    fresh.profile()
    x, weight = fresh.upload(rng.standard_normal((43, 72)).astype(np.float32)), fresh.upload(np.ones(72, np.float32))
    results = [fresh.download(fresh.rms_norm(x, weight, 1e-5)[0]) for _ in range(3)]
    fresh.sum(x)
    rows = {line.split()[0]: line.split() for line in fresh.profile_table().splitlines()}
    assert rows["norm_rms"][1] == "3" and rows["reduce:sum_part"][1] == "1" and rows["all"][1] == "5"
    assert float(rows["norm_rms"][2]) > 0
    fresh.profile(False)
    assert fresh.profile_table() == ""
    np.testing.assert_array_equal(results[0], fresh.download(fresh.rms_norm(x, weight, 1e-5)[0]))
