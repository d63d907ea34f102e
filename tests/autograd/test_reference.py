"""The reference device's own machinery: chunks, random numbers, optimizer arithmetic, sampling, memory, recording."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgrad.autograd import decoded_weights
from wgrad.autograd.ops import attention, linear, loss
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.ops.dropout import dropout_keep, philox
from wgrad.autograd.ops.optimizer import (
    HYPER_SIZE,
    STATE_APPLIED,
    STATE_APPLY,
    STATE_BIAS1,
    STATE_BIAS2,
    STATE_FACTOR,
    STATE_GRAD_NORM,
    STATE_SIZE,
    STATE_SKIPPED,
)
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device import main_memory
from wgrad.device.contract import Device


def test_it_is_a_device(cpu: ReferenceDevice) -> None:
    assert isinstance(cpu, Device)


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_passes_on_without_a_word(cpu: ReferenceDevice) -> None:
    """As on every device: a warning would be a second line beside a command's one error."""
    x = np.array([[np.inf, -np.inf, np.nan, 3e38]], np.float32)
    assert np.isnan(cpu.gemm(x, x, trans_b=True)).all()
    assert np.isinf(cpu.mul(x, x)).sum() == 3
    assert cpu.cast(x, np.float16)[0, 3] == np.inf


# ---- precision ---------------------------------------------------------------------------
def test_float64_is_never_rounded(cpu: ReferenceDevice) -> None:
    x = np.full((2, 3), 1 / 3)
    assert cpu.gemm(x, x, trans_b=True, dtype=np.float16).dtype == np.float64
    assert cpu.cast(x, np.float32).dtype == np.float32


def test_float16_is_computed_in_float32(cpu: ReferenceDevice) -> None:
    """1 + 2048 times 2^-11 is 2 in float32; added up in float16 it stays 1."""
    x = np.full((1, 2049), 2.0**-11, np.float16)
    x[0, 0] = 1
    assert cpu.gemm(x, np.ones((1, 2049), np.float16), trans_b=True)[0, 0] == 2


# ---- blocks and chunks change nothing ----------------------------------------------------
def test_attention_is_the_same_in_blocks_of_one_row(
    cpu: ReferenceDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, do = (rng.standard_normal((2, 23, h, 8)) for h in (4, 2, 2, 4))
    doc_start = np.where(np.arange(23) < 9, 0, 9).astype(np.int32)[None].repeat(2, 0)
    args: dict[str, Any] = {"scale": 0.3, "window": 7}

    def run() -> list[np.ndarray]:
        o, lse = cpu.attention(q, k, v, doc_start, np.zeros(1, np.int32), **args)
        return [o, lse, *cpu.attention_backward(do, q, k, v, o, lse, doc_start, **args)]

    whole = run()
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1)
    for one, other in zip(whole, run()):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_attention_memory_does_not_hold_all_scores(cpu: ReferenceDevice, rng: np.random.Generator) -> None:
    blocks = list(attention._blocks(np.zeros((1, 3000), np.int32), 0, 3000, 16, 0))
    assert max((r.stop - r.start) * (k.stop - k.start) * 16 for _, r, k, _ in blocks) <= 2_200_000
    assert sum(r.stop - r.start for _, r, _, _ in blocks) == 3000


def test_loss_is_the_same_in_chunks_of_one_token(
    cpu: ReferenceDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = rng.standard_normal((9, 5)), rng.standard_normal((11, 5))
    targets = np.array([0, 10, -100, 3, 3, -100, 7, 1, 2], np.int32)
    options = {"bias": rng.standard_normal(11), "need_dweight": True, "need_dbias": True}
    whole = cpu.linear_cross_entropy(x, w, targets, **options)
    monkeypatch.setattr(loss, "LOGIT_ELEMENTS", 1)
    for one, other in zip(whole, cpu.linear_cross_entropy(x, w, targets, **options)):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("double", [False, True])
def test_nf4_matmul_is_the_same_in_chunks_of_one_row(
    cpu: ReferenceDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, double: bool
) -> None:
    """Rows of 33 elements: chunks begin and end within bytes and within blocks."""
    weight = cpu.quantize(rng.standard_normal((7, 33)).astype(np.float32), 32, double=double)
    x, dy = rng.standard_normal((4, 33)), rng.standard_normal((4, 7))
    monkeypatch.setattr(linear, "DECODE_ELEMENTS", 1)
    dense = cpu.dequantize(weight).astype(np.float64)
    # The product computes the scale in float64 here, the dense weight was rounded to float32.
    np.testing.assert_allclose(cpu.linear_quantized(x, weight), x @ dense.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cpu.linear_quantized_backward(dy, weight), dy @ dense, rtol=1e-5, atol=1e-6)


# ---- random numbers ----------------------------------------------------------------------
KNOWN_ANSWERS = [  # the published test vectors of Random123: counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox(np.array([counter], np.uint32), np.array(key, np.uint32))
    np.testing.assert_array_equal(found[0], np.array(expected, np.uint32))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9])
def test_dropout_keeps_the_right_share(p: float) -> None:
    keep = dropout_keep(200_003, p, np.array([1, 2], np.uint32), 9)
    deviation = np.sqrt(p * (1 - p) / keep.size)
    assert abs(keep.mean() - (1 - p)) <= 4 * deviation


def test_dropout_masks_differ_by_salt_and_seed() -> None:
    seed = np.array([1, 2], np.uint32)
    first = dropout_keep(1000, 0.5, seed, 0)
    np.testing.assert_array_equal(first, dropout_keep(1000, 0.5, seed, 0))
    np.testing.assert_array_equal(first[:777], dropout_keep(777, 0.5, seed, 0))
    assert np.count_nonzero(first != dropout_keep(1000, 0.5, seed, 1)) > 400
    assert np.count_nonzero(first != dropout_keep(1000, 0.5, seed + 1, 0)) > 400


# ---- optimizer ---------------------------------------------------------------------------
def clip(device: Device, norm: tuple[float, float], *, max_norm: float = 0, interval: float = 0, scale: float = 1.0,
         state: np.ndarray | None = None) -> tuple[np.ndarray, float]:  # fmt: skip
    hyper = np.zeros(HYPER_SIZE, np.float32)
    hyper[:3] = 0.1, max_norm, interval
    held = device.upload(np.zeros(STATE_SIZE, np.float32) if state is None else state)
    loss_scale = device.upload(np.array([scale], np.float32))
    device.clip(
        device.upload(np.array(norm, np.float32)), device.upload(hyper), held, loss_scale, beta1=0.9, beta2=0.999
    )
    return device.download(held), float(device.download(loss_scale)[0])


def test_clip_takes_the_loss_scale_out(cpu: ReferenceDevice) -> None:
    state, scale = clip(cpu, (64.0 * 64, 0), max_norm=0.5, scale=16.0)
    assert state[STATE_GRAD_NORM] == 4 and state[STATE_APPLY] == 1 and scale == 16
    np.testing.assert_allclose(state[STATE_FACTOR], 0.5 / 4 / 16, rtol=1e-5)


def test_clip_leaves_a_small_gradient(cpu: ReferenceDevice) -> None:
    assert clip(cpu, (0.25, 0), max_norm=1.0)[0][STATE_FACTOR] == 1


def test_clip_counts_and_corrects(cpu: ReferenceDevice) -> None:
    state = None
    for _ in range(5):
        state, _ = clip(cpu, (1.0, 0), state=state)
    assert state is not None and state[STATE_APPLIED] == 5
    np.testing.assert_allclose(state[[STATE_BIAS1, STATE_BIAS2]], [1 - 0.9**5, 1 - 0.999**5], rtol=1e-6)


@pytest.mark.parametrize("norm", [(1.0, 3.0), (np.inf, 0.0)])
def test_clip_skips_what_is_not_finite(cpu: ReferenceDevice, norm: tuple[float, float]) -> None:
    before, _ = clip(cpu, (1.0, 0))
    state, scale = clip(cpu, norm, interval=5, scale=16.0, state=before)
    assert (state[STATE_APPLY], state[STATE_GRAD_NORM], state[STATE_SKIPPED], scale) == (0, -1, 1, 8)
    assert state[STATE_APPLIED] == before[STATE_APPLIED] and state[STATE_BIAS1] == before[STATE_BIAS1]
    assert clip(cpu, norm, interval=5, scale=1.0)[1] == 1
    assert clip(cpu, norm, interval=0, scale=16.0)[1] == 16


def test_the_loss_scale_grows_after_its_interval(cpu: ReferenceDevice) -> None:
    state, scale, seen = None, 4.0, []
    for _ in range(7):
        state, scale = clip(cpu, (1.0, 0), interval=3, scale=scale, state=state)
        seen.append(scale)
    assert seen == [4, 4, 8, 8, 8, 16, 16]
    assert clip(cpu, (1.0, 0), interval=1, scale=65536.0)[1] == 65536


def test_a_skipped_step_changes_nothing(cpu: ReferenceDevice, rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(9).astype(np.float32) for _ in range(3)] + [np.ones(9, np.float32)]
    before = [a.copy() for a in arrays]
    cpu.adamw(*arrays, np.ones(HYPER_SIZE, np.float32), np.zeros(STATE_SIZE, np.float32), beta1=0.9, beta2=0.99,
              eps=1e-8, weight_decay=0.1, decay_elements=9)  # fmt: skip
    for one, other in zip(before, arrays):
        np.testing.assert_array_equal(one, other)


# ---- sampling ----------------------------------------------------------------------------
def draw(logits: list[float], uniform: float, **options: Any) -> int:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = sample_settings(**{**defaults, **options})[None]
    return int(ReferenceDevice().sample(np.array(logits, np.float32), np.array([uniform], np.float32), settings)[0])


LOGITS = list(np.log([0.1, 0.4, 0.2, 0.3]))


def test_sample_inverts_the_distribution_in_id_order() -> None:
    assert [draw(LOGITS, u) for u in (0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 0.999)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    assert draw([0.0, 3.0, 3.0], 0.9, temperature=0.0) == 1


def test_top_k_keeps_ties() -> None:
    assert [draw([1.0, 5.0, 5.0, 5.0], u, top_k=2) for u in (0.0, 0.34, 0.67)] == [1, 2, 3]


def test_top_p_takes_the_fewest_that_reach_it() -> None:
    assert {draw(LOGITS, u, top_p=0.65) for u in np.linspace(0, 0.999, 50)} == {1, 3}
    assert {draw(LOGITS, u, top_p=0.75) for u in np.linspace(0, 0.999, 50)} == {1, 2, 3}
    assert {draw(LOGITS, u, top_p=1e-6) for u in np.linspace(0, 0.999, 50)} == {1}


def test_temperature_sharpens() -> None:
    counts = [np.bincount([draw(LOGITS, u, temperature=t) for u in np.linspace(0, 0.999, 200)]) for t in (0.1, 10.0)]
    assert counts[0].max() > 180 and counts[1].max() < 70


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), k=st.integers(0, 40), p=st.floats(0.05, 1), u=st.floats(0, 0.999999))
def test_a_sample_is_always_allowed(seed: int, k: int, p: float, u: float) -> None:
    """Against a slow version: sort, cut at k (with ties), cut where the rest before reaches p."""
    logits = np.random.default_rng(seed).standard_normal(30).astype(np.float32)
    order = np.argsort(-logits)
    kept = order[:k] if k else order
    weights = np.exp(logits[kept].astype(np.float64))
    weights /= weights.sum()
    before = np.concatenate([[0], np.cumsum(weights)[:-1]])
    allowed = kept[(before < p) | (before == 0)]
    assert draw(logits.tolist(), u, top_k=k, top_p=p) in allowed


# ---- storage, memory, recording ----------------------------------------------------------
def test_memory_counts_living_arrays(cpu: ReferenceDevice) -> None:
    x = cpu.zeros((10, 10))
    y = cpu.scale(x, 2.0)
    view = cpu.view(y, (5,), 64)
    assert cpu.memory().in_use_bytes == 800
    del y
    assert cpu.memory().in_use_bytes == 800  # the view keeps it
    del view
    assert cpu.memory().in_use_bytes == 400 and cpu.memory().peak_bytes == 800
    cpu.reset_peak()
    assert cpu.memory().peak_bytes == 400


def test_upload_copies(cpu: ReferenceDevice) -> None:
    host = np.ones(3, np.float32)
    x = cpu.upload(host)
    host[:] = 2
    np.testing.assert_array_equal(x, 1)
    with pytest.raises(ValueError, match="int64 is not a device dtype"):
        cpu.upload(np.arange(3))


def test_replay_writes_into_the_same_arrays(cpu: ReferenceDevice) -> None:
    x = cpu.upload(np.ones((4, 32), np.float32))
    with cpu.capture() as replay:
        y, rstd = cpu.rms_norm(x, np.ones(32, np.float32), 1e-5)
        total = cpu.zeros((1,))
        cpu.add(total, cpu.sum(y), out=total)
    assert replay.dispatches == 4
    cpu.write(x, np.full((4, 32), -3.0, np.float32))
    for _ in range(2):  # `zeros` is recorded too, so that a second replay starts from nothing
        replay.run()
    np.testing.assert_allclose(total, [-128], rtol=1e-6)
    np.testing.assert_allclose(rstd, 1 / 3, rtol=1e-6)


def test_captures_do_not_nest(cpu: ReferenceDevice) -> None:
    with cpu.capture(), pytest.raises(RuntimeError, match="already running"), cpu.capture():
        pass


def weight_of(device: Any, seed: int) -> Any:
    """An NF4 weight of 7 rows of 64, and its values."""
    w = device.quantize(np.random.default_rng(seed).standard_normal((7, 64)).astype(np.float32))
    return w, w.rows(0, 7, np.dtype(np.float32))


def test_a_decoded_weight_is_kept_until_it_is_written_to_or_gone(monkeypatch: Any) -> None:
    """By a copy, a write and a fill, into the array itself or into memory of which it is a view."""
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    changes: list[Callable[[Any, Any, Any], None]] = [
        lambda device, mine, other: device.write(mine.packed, other.packed),
        lambda device, mine, other: device.copy(other.packed, device.view(mine.packed, mine.packed.shape)),
        lambda device, mine, other: device.fill(mine.absmax, 2.0),
    ]
    for change in changes:
        device: Any = ReferenceDevice()
        (mine, values), (other, _) = weight_of(device, 2), weight_of(device, 3)
        calls = list[Any]()
        monkeypatch.setattr(type(mine), "rows", counted(type(mine).rows, calls))
        for _ in range(3):
            np.testing.assert_array_equal(device.linear_quantized(x, mine), x @ values.T)
        assert len(calls) == 1 and device._decoded.kept_bytes == 4 * 7 * 64
        change(device, mine, other)
        monkeypatch.undo()
        for _ in range(2):
            np.testing.assert_array_equal(device.linear_quantized(x, mine), x @ mine.rows(0, 7, x.dtype).T)
        assert device._decoded.kept_bytes == 0
        device.linear_quantized(x, other)
        del other, mine
        calls.clear()
        gc.collect()
        assert device._decoded.kept_bytes == 0 and not device._decoded._of_owner


def counted(function: Any, calls: list[Any]) -> Any:
    def call(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return call


def test_decoded_weights_take_a_share_of_free_memory_and_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(decoded_weights, "free_memory", lambda: 4 * (2 * 4 * 7 * 64))  # a share has room for two
    device: Any = ReferenceDevice()
    weights = [weight_of(device, seed)[0] for seed in range(3)]
    x = np.ones((1, 64), np.float32)
    before = device.memory().in_use_bytes
    kept = [device.linear_quantized(x, w) is not None and device._decoded.kept_bytes for w in weights]
    assert kept == [4 * 7 * 64, 8 * 7 * 64, 8 * 7 * 64]
    assert device.memory().in_use_bytes - before >= 8 * 7 * 64
    exact = x.astype(np.float64) @ weights[0].rows(0, 7, np.dtype(np.float64)).T  # what is kept is rounded
    np.testing.assert_array_equal(device.linear_quantized(x.astype(np.float64), weights[0]), exact)


def test_decoded_experts_are_kept_too() -> None:
    device: Any = ReferenceDevice()
    w = device.quantize(np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32))  # 2 experts of 3 rows
    x, start = np.ones((5, 64), np.float32), np.array([0, 2, 5], np.int32)
    values = w.rows(0, 6, np.dtype(np.float32))
    for _ in range(2):
        y = device.grouped_linear(x, w, start)
        np.testing.assert_array_equal(y, np.concatenate([x[:2] @ values[:3].T, x[2:] @ values[3:].T]))
        assert device._decoded.kept_bytes == 4 * 6 * 64


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="other systems do not tell what is free")
def test_a_container_has_less_memory_than_the_machine(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(main_memory, "_GROUP", tmp_path)
    whole, free = main_memory.main_memory(), main_memory.free_memory()
    assert whole and free and free <= whole
    (tmp_path / "memory.max").write_text("max", encoding="ascii")
    assert main_memory.main_memory() == whole
    (tmp_path / "memory.max").write_text("5000", encoding="ascii")
    (tmp_path / "memory.current").write_text("1000", encoding="ascii")
    assert (main_memory.main_memory(), main_memory.free_memory()) == (5000, 4000)
