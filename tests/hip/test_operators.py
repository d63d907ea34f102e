"""Every operator of the contract on the emulated GPU: wave32 and wave64, both orders of execution, guarded memory."""

from __future__ import annotations

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from tests.case_results import assert_case
from tests.device.test_gguf_formats import any_blocks, shape_of
from wgrad.autograd.ops.optimizer import STATE_APPLIED, STATE_SKIPPED
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case
from wgrad.autograd.selftest.cases import cases
from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.hip.elements import implements

CASES = [case for case in cases() if case.op not in implements.lacks]
# Cases whose kernels have barriers or hand data from wave to wave: run in the reversed order too.
REVERSED = [
    c
    for c in CASES
    if "float32" in c.dtype and any(s in c.name for s in ("133x", "3x1003", "/all/", "70001", "linear_nf4/row double"))
]


# One case of each operator and direction, float16 where there is one: for the architectures whose kernels differ from
# those of their wave size in the matrix instructions alone (test_every_kernel.py).
EACH_OPERATOR = list({(c.op, c.direction): c for c in sorted(CASES, key=lambda c: "float16" in c.dtype)}.values())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases_are_within_their_limits(hip_device: Any, case: Case) -> None:
    assert_case(case, hip_device)


@pytest.mark.parametrize("case", REVERSED, ids=lambda c: c.name)
def test_workgroups_may_run_in_reversed_order(hip_device: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", "rev")
    assert_case(case, hip_device)


def test_sums_have_the_same_bits_in_any_order(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    x = hip_device.upload(rng.standard_normal((133, 67)).astype(np.float32))
    ids = hip_device.upload(rng.integers(0, 5, 133).astype(np.int32))

    def results() -> list[np.ndarray]:
        made = (hip_device.sum(x), hip_device.sum_rows(x), hip_device.embedding_backward(x, ids, 5))
        return [hip_device.download(a) for a in made]

    first = results()
    monkeypatch.setenv("WGRAD_EMULATED_ORDER", "rev")
    for one, other in zip(first, results()):
        np.testing.assert_array_equal(one, other)


def test_values_of_gguf_are_those_of_its_package(hip_device: Any) -> None:
    rng = np.random.default_rng(11)
    for name, kind in gguf_formats().items():
        data = any_blocks(name, rng, 3)
        weight = kind.from_gguf(data, shape_of(name, data))
        found = hip_device.download(hip_device.dequantize(weight.map_arrays(hip_device.upload)))
        np.testing.assert_array_equal(found, gguf.dequantize(data, gguf.GGMLQuantizationType[name]), err_msg=name)


@pytest.mark.parametrize("shape", [(7, 123), (41, 64), (1, 3)])
def test_bfloat16_rounds_to_nearest_even(hip_device: Any, shape: tuple[int, int]) -> None:
    """cast through every kind of bit pattern but NaN, against ml_dtypes."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, shape).astype(np.uint32)
    bits[0, :3] = 0x3F808000, 0x3F818000, 0x3F808001  # ties to even, and just above a tie
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(0.5), x)
    with np.errstate(over="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16)
    found = hip_device.download(hip_device.cast(hip_device.upload(x), ml_dtypes.bfloat16))
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


def test_log_odds_of_several_work_groups(hip_device: Any) -> None:
    x = -np.random.default_rng(3).exponential(1.0, 2 * 2048 + 3).astype(np.float32)
    found = hip_device.download(hip_device.log_odds(hip_device.upload(x)))
    np.testing.assert_allclose(found, ReferenceDevice().log_odds(x.astype(np.float64)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [32, 256, 512, 4096])
def test_nf4_of_every_block_size_equals_the_reference(hip_device: Any, block_size: int) -> None:
    """Codes and absmax against the reference, bit for bit; the last block is not full."""
    x = np.random.default_rng(5).standard_normal((67, 131)).astype(np.float32)
    wanted = ReferenceDevice().quantize(x, block_size)
    found = hip_device.quantize(hip_device.upload(x), block_size)
    np.testing.assert_array_equal(hip_device.download(found.absmax), wanted.absmax)
    np.testing.assert_array_equal(hip_device.download(found.packed), wanted.packed)


@pytest.mark.parametrize(("width", "dtype"), [(64, np.float32), (64, np.float16), (10, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("first", [0, 4, 9, 11])
def test_rope_append_is_rope_and_append(hip_device: Any, width: int, dtype: Any, first: int) -> None:
    """To the bit, on all that is in the cache; what lies past its end is left out."""
    rng, d = np.random.default_rng(9), hip_device
    batch, tokens, length, groups = 2, 5, 11, 3
    k, v = (d.upload(rng.standard_normal((batch * tokens, groups, width)).astype(dtype)) for _ in range(2))
    cos, sin = (d.upload(rng.standard_normal((20, width // 2)).astype(np.float32)) for _ in range(2))
    positions = d.upload(rng.integers(0, 20, batch * tokens).astype(np.int32))
    before = rng.standard_normal((2, batch, length, groups, width)).astype(dtype)
    keys, values = (d.upload(cache) for cache in before)
    d.rope_append(k, v, cos, sin, positions, keys, values, d.upload(np.array([first], np.int32)))
    for found, cache, new in zip((keys, values), before, (d.rope(k, cos, sin, positions), v)):
        wanted, rows = cache.copy(), d.download(new).reshape(batch, tokens, groups, width)
        wanted[:, first : first + tokens] = rows[:, : length - first]
        np.testing.assert_array_equal(d.download(found), wanted)


def test_embedding_gradient_links_places_across_blocks(hip_device: Any) -> None:
    """More tokens than one pass over them takes; some ids come once, one in nearly every pass."""
    rng = np.random.default_rng(11)
    ids = rng.integers(0, 300, 1003).astype(np.int32)
    ids[::100] = 299
    dy = rng.integers(-8, 9, (ids.size, 9)).astype(np.float32)  # sums are exact
    wanted = np.zeros((301, 9), np.float32)
    np.add.at(wanted, ids, dy)
    found = hip_device.embedding_backward(hip_device.upload(dy), hip_device.upload(ids), 301)
    np.testing.assert_array_equal(hip_device.download(found), wanted)


def test_a_norm_beyond_float32_skips_the_step(hip_device: Any) -> None:
    """Every gradient is finite, and the sum of their squares is not."""
    d, scale = hip_device, hip_device.upload(np.ones(1, np.float32))
    norm = d.grad_norm(d.upload(np.full(9, 1e30, np.float32)))
    np.testing.assert_array_equal(d.download(norm), [np.inf, 0])
    state = d.zeros((8,))
    d.clip(norm, d.upload(np.ones(4, np.float32)), state, scale, beta1=0.9, beta2=0.99)
    assert list(d.download(state)[[STATE_APPLIED, STATE_SKIPPED]]) == [0, 1]


def test_losses_of_a_chunk_of_rows_are_written_at_theirs(hip_device: Any) -> None:
    """Rows 3 and 4 of five: their targets are read, and their losses written, at their places."""
    d, x = hip_device, np.array([[0, 1, 2], [3, 0, 0]], np.float32)
    targets, losses = np.array([0, 0, 0, 2, 1], np.int32), d.zeros((5,))
    d.launch("softmax", "cross_entropy", [d.upload(x), d.upload(targets), losses, 3, 3, 0, 0.0], (2, 1, 1))
    wanted = np.log(np.exp(x).sum(1)) - x[[0, 1], targets[3:]]
    np.testing.assert_allclose(d.download(losses), [0, 0, 0, *wanted], rtol=1e-5)


def test_losses_are_the_same_in_chunks_of_rows(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.hip.loss.loss.CHUNK_BYTES", 0)  # 128 rows
    case = next(c for c in CASES if c.name == "linear_cross_entropy/bias/133x123x41/float32")
    assert_case(case, hip_device)
