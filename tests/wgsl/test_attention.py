"""Attention on wgpu: the self-test's cases, every tile of the tables, splits, batch windows, determinism, memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.run import EPSILON, MULTIPLE
from wgrad.device.errors import DeviceError, TooLarge
from wgrad.wgsl.attention.attention_plan import BACKWARD, FEW_REGISTERS, FORWARD, Plan, Tile, decode_bytes, plan
from wgrad.wgsl.device import WgpuDevice

F32 = np.dtype(np.float32)
CASES = [c for c in cases(True) if c.op in ("attention", "attention_backward")]
# The head widths that a table's tiles are tried with: what it serves, or less, which a software driver compiles sooner.
WIDTHS = {64: (40, 10), 128: (72, 10), 256: (72, 10)}
TILES = {
    (tile, width, backward)
    for backward, tables in ((False, FORWARD), (True, BACKWARD))
    for widest, tiles in tables.items()
    for tile, width in itertools.product(tiles, WIDTHS.get(widest, ()))
} | {
    (tiles[0], width, backward)
    for (_, tiles), width in zip(FEW_REGISTERS.items(), (32, 40, 72, 129))
    for backward in (False, True)
}


@pytest.fixture
def device(wgpu_device: Any) -> WgpuDevice:
    return wgpu_device


@pytest.fixture
def planned(device: WgpuDevice) -> Iterator[WgpuDevice]:
    """The device, with its plan set back afterwards."""
    yield device
    device.attention_plan = None


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases_are_within_their_limits(case: Case, device: WgpuDevice) -> None:
    if "float16" in case.dtype and not device.float16:
        pytest.skip("the device has no float16")
    assert_case(case, device)


def test_the_last_query_that_sees_a_key_begins_a_tile(device: WgpuDevice) -> None:
    """Query 32 is the last in whose window key 31 is, the last of its tile."""
    for window in (2, 34):
        assert_case(attention_case("window", (1, 97, 4, 2, 40), F32, window=window, backward=True), device)


@pytest.mark.parametrize(("tile", "width", "backward"), sorted(TILES, key=repr), ids=repr)
def test_every_tile_of_the_tables_is_within_the_limits(
    tile: Tile, width: int, backward: bool, planned: WgpuDevice
) -> None:
    """Packed documents and a window over three tiles, so that whole, masked and skipped tiles all occur."""
    planned.attention_plan = Plan(tile, tile, tile, wanted_groups=1)
    used = tile.backward_bytes(width) if backward else tile.forward_bytes(width)
    if used > planned.workgroup_bytes:
        pytest.skip("the device has too little workgroup memory")
    shape = (1, 2 * max(tile.rows, tile.columns) + 7, 2, 1, width)
    assert_case(attention_case("tile", shape, F32, documents=3, window=61, backward=backward), planned)


@pytest.mark.parametrize(("memory", "backward"), [(32_768, False), (16_384, True)])
def test_heads_of_512_are_within_the_limits(memory: int, backward: bool, planned: WgpuDevice) -> None:
    chosen = plan(512, memory)
    assert chosen is not None
    planned.attention_plan = dataclasses.replace(chosen, wanted_groups=1)
    assert_case(attention_case("wide", (1, 67, 2, 1, 512), F32, documents=2, window=37, backward=backward), planned)


@pytest.mark.parametrize("wanted", [1, 7, 40, 10_000])
@pytest.mark.parametrize("backward", [False, True])
def test_splits_are_within_the_limits(wanted: int, backward: bool, planned: WgpuDevice) -> None:
    chosen = plan(64, 16_384)
    assert chosen is not None
    planned.attention_plan = dataclasses.replace(chosen, wanted_groups=wanted)
    assert_case(attention_case("splits", (1, 261, 6, 1, 64), F32, documents=2, backward=backward), planned)


def test_part_of_a_split_may_see_no_key(planned: WgpuDevice) -> None:
    """A cache of 1003 keys of which three are filled: all splits but the first have nothing to do."""
    chosen = plan(64, 16_384)
    assert chosen is not None
    planned.attention_plan = dataclasses.replace(chosen, wanted_groups=10_000)
    assert_case(attention_case("empty parts", (2, 2, 4, 2, 64), F32, keys=1003, cache_len=1), planned)


@pytest.mark.parametrize(
    ("shape", "cache_len", "window"),
    [
        ((1, 1, 8, 1, 64), 700, 0),  # the most rows that the decoding kernel takes
        ((2, 3, 4, 2, 40), 129, 0),
        ((1, 2, 6, 2, 10), 255, 70),  # element by element
        ((1, 1, 8, 1, 512), 63, 0),
        ((1, 1, 9, 1, 64), 191, 0),  # one row too many for it
    ],
)
def test_decoding_ignores_the_cache_beyond_its_last_token(
    shape: tuple[int, int, int, int, int], cache_len: int, window: int, device: WgpuDevice
) -> None:
    """The rest holds NaN, of which no bit may show. Compare with the same cache cut to its length."""
    b, t, h, g, d = shape
    x = _inputs(shape)
    rng = np.random.default_rng(1)
    for name in ("k", "v"):
        x[name] = np.full((b, cache_len + t + 333, g, d), np.nan, F32)
        x[name][:, : cache_len + t] = rng.standard_normal((b, cache_len + t, g, d))
    x["cache_len"][0] = cache_len
    names = ("q", "k", "v", "doc_start", "cache_len")
    cut = {n: (v[:, : cache_len + t] if n in "kv" else v) for n, v in x.items()}
    wide = {n: v.astype(np.float64) if v.dtype == F32 else v for n, v in cut.items()}
    exact = ReferenceDevice().attention(*(wide[n] for n in names), scale=0.3, window=window)
    plain = ReferenceDevice().attention(*(cut[n] for n in names), scale=0.3, window=window)
    found = device.attention(*(device.upload(x[n]) for n in names), scale=0.3, window=window)
    for array, value, same in zip(found, exact, plain):
        limit = MULTIPLE["forward"] * np.abs(same - value).max() + BUILTIN_ULPS * EPSILON * np.abs(value).max()
        assert np.abs(device.download(array) - value).max() <= limit


def _inputs(shape: tuple[int, int, int, int, int], seed: int = 0) -> dict[str, np.ndarray]:
    b, t, h, g, d = shape
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal((b, t, x, d)).astype(F32) for n, x in (("q", h), ("k", g), ("v", g), ("do", h))}
    return arrays | {"doc_start": np.zeros((b, t), np.int32), "cache_len": np.zeros(1, np.int32)}


def _all(device: WgpuDevice, x: dict[str, np.ndarray], scale: float) -> list[np.ndarray]:
    a = {n: device.upload(v) for n, v in x.items()}
    o, lse = device.attention(a["q"], a["k"], a["v"], a["doc_start"], a["cache_len"], scale=scale)
    grads = device.attention_backward(a["do"], a["q"], a["k"], a["v"], o, lse, a["doc_start"], scale=scale)
    return [device.download(r) for r in (o, lse, *grads)]


def test_batches_larger_than_a_binding_have_the_same_bits(device: WgpuDevice) -> None:
    """One batch element of q takes 20,480 bytes; two fit a binding of 49,152, so that five take three dispatches."""
    x = _inputs((5, 64, 2, 1, 40))
    small = bind(WgpuDevice)(max_binding_bytes=49_152)
    for whole, windowed in zip(_all(device, x, 0.1), _all(small, x, 0.1)):
        np.testing.assert_array_equal(whole, windowed)


def test_a_row_larger_than_a_binding_is_refused() -> None:
    small = bind(WgpuDevice)(max_binding_bytes=16_384)
    x = _inputs((1, 64, 2, 1, 64))
    with pytest.raises(TooLarge, match=r"attention: .* 32,768 bytes do not fit one binding.*--max-length"):
        _all(small, x, 0.1)


def test_attention_gives_the_same_bits_twice(device: WgpuDevice) -> None:
    x = _inputs((1, 301, 6, 2, 64))
    for first, second in zip(_all(device, x, 0.125), _all(device, x, 0.125)):
        np.testing.assert_array_equal(first, second)


def test_large_scores_stay_finite(device: WgpuDevice) -> None:
    """Scores of some +-2000, where exp without the running maximum overflows."""
    x = _inputs((1, 77, 2, 1, 64))
    x["q"] *= 40
    reference = ReferenceDevice()
    wide = {n: v.astype(np.float64) if v.dtype == F32 else v for n, v in x.items()}
    exact, _ = reference.attention(*(wide[n] for n in ("q", "k", "v", "doc_start", "cache_len")), scale=1.0)
    # A score of 2000 is rounded to 1e-4, and how much of that shows depends on the order of its sum: the plain error is
    # the largest over a few orders of the head's elements.
    rng, errors = np.random.default_rng(0), []
    for _ in range(8):
        order = rng.permutation(64)
        mixed = (x["q"][..., order], x["k"][..., order], x["v"], x["doc_start"], x["cache_len"])
        errors.append(np.abs(reference.attention(*mixed, scale=1.0)[0] - exact).max())
    found = _all(device, x, 1.0)
    assert all(np.isfinite(r).all() for r in found)
    limit = MULTIPLE["forward"] * max(errors) + BUILTIN_ULPS * EPSILON * np.abs(exact).max()
    assert np.abs(found[0] - exact).max() <= limit


def test_scores_never_stand_whole(planned: WgpuDevice) -> None:
    """One head, T = 1101: T x T scores would take 4.8 MB, all that is allocated takes less than a quarter of it."""
    device, t, chosen = planned, 1101, plan(32, 16_384)
    assert chosen is not None
    planned.attention_plan = dataclasses.replace(chosen, wanted_groups=1)
    x = _inputs((1, t, 1, 1, 32))
    a = {n: device.upload(v) for n, v in x.items()}
    device.synchronize()
    device.reset_peak()
    before = device.memory().in_use_bytes
    o, lse = device.attention(a["q"], a["k"], a["v"], a["doc_start"], a["cache_len"], scale=0.1)
    device.attention_backward(a["do"], a["q"], a["k"], a["v"], o, lse, a["doc_start"], scale=0.1)
    device.synchronize()
    assert device.memory().peak_bytes - before < t * t * 4 / 4


def test_a_new_length_compiles_nothing(device: WgpuDevice) -> None:
    _all(device, _inputs((1, 100, 2, 1, 64)), 0.125)
    compiled = device.pipelines_compiled()
    _all(device, _inputs((2, 57, 2, 1, 64)), 0.125)
    assert device.pipelines_compiled() == compiled


def test_16_kib_hold_every_width() -> None:
    """WebGPU guarantees 16,384 bytes of workgroup memory."""
    for width, few in itertools.product((*range(2, 257, 2), 258, 400, 510, 512), (False, True)):
        chosen = plan(width, 16_384, few_registers=few)
        assert chosen is not None, width
        assert chosen.forward.forward_bytes(width) <= 16_384, width
        assert max(chosen.dq.backward_bytes(width), chosen.dkv.backward_bytes(width)) <= 16_384, width


def test_decoding_keeps_to_the_workgroup_memory(device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its kernel does not fit, that of many queries serves."""
    assert decode_bytes(8, 512) <= 32_768 < 16_384 + decode_bytes(8, 256)
    launched = list[str]()
    monkeypatch.setattr(device, "launch", lambda name, *args, **options: launched.append(name))
    monkeypatch.setattr(
        "wgrad.wgsl.attention.attention.launch_range", lambda d, name, *args, **o: launched.append(name)
    )
    for memory, name in ((16_384, "attention"), (32_768, "attention_decode")):
        monkeypatch.setattr(device, "workgroup_bytes", memory)
        x = {n: device.upload(v) for n, v in _inputs((1, 1, 8, 1, 256)).items()}
        device.attention(*(x[n] for n in ("q", "k", "v", "doc_start", "cache_len")), scale=0.3)
        assert launched.pop(0) == name
        launched.clear()


def test_a_gpu_of_few_registers_gets_tiles_that_do_not_spill() -> None:
    """Each invocation owns 4 x 4 scores and as many outputs, whatever the width; 32 KiB is what DX12 gives."""
    widths = itertools.product((8, 32, 40, 64, 72, 128, 129, 256), (32_768, 65_536))
    for width, memory in (*widths, (260, 65_536), (512, 65_536)):
        chosen = plan(width, memory, few_registers=True)
        assert chosen is not None
        for tile in (chosen.forward, chosen.dq, chosen.dkv):
            constants = tile.constants(width)
            assert (constants["SCORES"], constants["ACC"], tile.depth, tile.flat) == (4, 4, 4, 4)


def test_a_device_too_small_is_refused(planned: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "workgroup_bytes", 4096)
    with pytest.raises(DeviceError, match="heads of 64 elements does not fit the 4,096 bytes"):
        _all(planned, _inputs((1, 8, 2, 1, 64)), 0.1)


@pytest.mark.parametrize("change", [{"rows": 36}, {"columns": 48}, {"depth": 6}, {"flat": 12}])
def test_a_tile_that_does_not_divide_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be|must divide"):
        dataclasses.replace(Tile(32, 32, 8, 8, 16, 16), **change)
