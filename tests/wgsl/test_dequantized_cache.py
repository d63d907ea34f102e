"""Weights that are decoded once for a stretch of work: the same bits, gone afterwards, never those of before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.wgsl.launches import launched
from tests.wgsl.small_tiles import SMALL_LARGE, SMALL_MEDIUM, SMALL_TWO
from wgrad.autograd.bind import bind
from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight, formats
from wgrad.device.formats.nf4 import NF4Array
from wgrad.device.memory import Array, size_class
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm, gemm_matrix, plan
from wgrad.wgsl.loss import loss
from wgrad.wgsl.moe import grouped
from wgrad.wgsl.runtime.dequantized_cache import DequantizedCache

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS, OUT, IN = 24, 64, 256


@pytest.fixture(params=["software", "matrix units"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways in which a weight is decoded before its product: into float32, and into float16 for tensor cores."""
    monkeypatch.setattr(plan, "_DEQUANTIZE_ROWS", ROWS - 1)
    monkeypatch.setattr(gemm_matrix, "LARGE", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    return request.getfixturevalue("wgpu_device" if request.param == "software" else "matrix_device")


@pytest.fixture
def decodes(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return launched(device, monkeypatch, "quantize_decode")


def weight_of(device: Any, seed: int, format: str = "nf4", double: bool = False, rows: int = OUT) -> FrozenWeight:
    values = np.random.default_rng(seed).standard_normal((rows, IN)).astype(np.float32)
    return formats()[format].quantize(values, double=double).map_arrays(device.upload)


def products(device: Any, weight: FrozenWeight) -> list[np.ndarray]:
    """Forward and backward."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((ROWS, width)).astype(np.float16) for width in weight.shape[::-1])
    y = device.linear_quantized(device.upload(x), weight)
    return [device.download(y), device.download(device.linear_quantized_backward(device.upload(dy), weight))]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("format", ["nf4", "q6_k", "iq2_xs", "nf4 double", "nf4 stack"])
def test_each_is_decoded_once_to_the_same_bits_and_then_gone(device: Any, decodes: list[str], format: str) -> None:
    name, _, kind = format.partition(" ")
    weights = [weight_of(device, seed, name, kind == "double") for seed in (1, 2)]
    if kind == "stack":
        stack = NF4Array.stack(weights, device)  # type: ignore[arg-type]
        weights = [stack, weight_of(device, 3)]  # type: ignore[list-item]
    expected = [products(device, weight) for weight in weights]
    assert len(decodes) == 4
    start = device.memory().in_use_bytes
    with device.caching_dequantized():
        for _ in range(2):
            assert all(same(products(device, weight), wanted) for weight, wanted in zip(weights, expected))
        assert len(decodes) == 4 + 2 and device.memory().in_use_bytes > start
    assert device.memory().in_use_bytes == start
    products(device, weights[0])
    assert len(decodes) == 4 + 2 + 2


def test_the_outermost_stretch_ends_it_with_or_without_an_error(device: Any, decodes: list[str]) -> None:
    weight = weight_of(device, 1)
    start = device.memory().in_use_bytes
    with device.caching_dequantized():
        with device.caching_dequantized():
            products(device, weight)
        products(device, weight)
        assert len(decodes) == 1
    assert device.memory().in_use_bytes == start
    with pytest.raises(KeyError), device.caching_dequantized():
        products(device, weight)
        raise KeyError
    assert device.memory().in_use_bytes == start
    products(device, weight)
    assert len(decodes) == 4


def _write(device: Any, codes: Any, new: np.ndarray) -> None:
    device.write(codes, new)


def _transfer(device: Any, codes: Any, new: np.ndarray) -> None:
    host = device.empty_host(new.shape, new.dtype)
    device.write(host, new)
    device.transfer(host, codes)


def _copy_to_a_view(device: Any, codes: Any, new: np.ndarray) -> None:
    device.copy(device.upload(new), device.view(codes, codes.shape))


@pytest.mark.parametrize("change", [_write, _transfer, _copy_to_a_view])
def test_a_weight_that_is_written_to_is_decoded_again(
    device: Any, decodes: list[str], change: Callable[[Any, Any, np.ndarray], None]
) -> None:
    weight, other, third = (weight_of(device, seed) for seed in (1, 2, 3))
    expected = products(device, other)
    decodes.clear()
    with device.caching_dequantized():
        products(device, weight)
        products(device, third)
        for name, array in weight.arrays().items():
            if array is not None:
                change(device, array, device.download(other.arrays()[name]))
        assert same(products(device, weight), expected)
        products(device, third)
    assert len(decodes) == 3  # of the third, whose memory nobody wrote to, once


def test_a_weight_that_is_gone_leaves_its_memory_to_none_before_the_end(device: Any) -> None:
    """A new one of the same place and shape would be taken for it."""
    expected = products(device, weight_of(device, 2))
    with device.caching_dequantized():
        for seed in (1, 2):
            found = products(device, weight_of(device, seed))
    assert same(found, expected)


def test_a_kept_dense_weight_is_found_by_its_place_shape_and_dtype(wgpu_device: Any) -> None:
    cache, table = DequantizedCache(), wgpu_device.zeros((256, 64), np.float16)
    cache.keep_dense(table, values := wgpu_device.zeros((4,)))
    assert cache.dense(wgpu_device.view(table, (256, 64))) is values
    others = [wgpu_device.view(table, shape, offset) for shape, offset in (((64, 256), 0), ((128, 64), 128 * 64))]
    others.append(Array(table.lease, 0, table.shape, BF16))
    assert [cache.dense(other) for other in others] == [None] * 3
    assert cache.dense(wgpu_device.zeros((256, 64), np.float16)) is None


def test_a_recording_decodes_what_it_reads(device: Any, decodes: list[str]) -> None:
    """A weight decoded before the recording is not carried in, nor is one decoded in it carried out."""
    weight, other = weight_of(device, 1), weight_of(device, 2)
    x = device.upload(np.ones((ROWS, IN), np.float16))
    expected = device.download(device.linear_quantized(x, other))
    decodes.clear()
    with device.caching_dequantized():
        device.linear_quantized(x, weight)
        with device.capture() as replay:
            found = [device.linear_quantized(x, weight) for _ in range(2)]
        assert len(decodes) == 2
        device.linear_quantized(x, weight)
        assert len(decodes) == 3
    for name, array in weight.arrays().items():
        if array is not None:
            device.write(array, device.download(other.arrays()[name]))
    device.zeros((OUT, IN))  # may be where a decoded one was
    replay.run()
    for array in found:
        np.testing.assert_array_equal(device.download(array), expected)


def test_where_memory_is_short_they_go(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two weights' decoded forms has room: all is computed, in memory that one at a time takes."""
    device = bind(WgpuDevice)()
    rows = 4096
    weights = [weight_of(device, seed, rows=rows) for seed in (1, 2)]
    expected = [products(device, weight) for weight in weights]
    device.trim()
    decodes = launched(device, monkeypatch, "quantize_decode")
    limit = device.memory().reserved_bytes + rows * IN * 4 * 3 // 2
    device.limit_memory(limit)
    with device.caching_dequantized():
        for _ in range(2):
            assert all(same(products(device, weight), wanted) for weight, wanted in zip(weights, expected))
    assert len(decodes) == 4 and device.memory().peak_reserved_bytes <= limit


def test_a_dry_run_decodes_as_often_in_the_same_memory(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(device: Any) -> tuple[int, int, int]:
        decodes, kept = launched(device, monkeypatch, "quantize_decode"), device.memory().in_use_bytes
        weights = [weight_of(device, seed) for seed in (1, 2)]
        for _ in range(2):
            with device.capture(), device.caching_dequantized():
                for weight in (*weights, *weights):
                    products(device, weight)
        memory = device.memory()
        return len(decodes), memory.peak_bytes - kept, memory.in_use_bytes - kept

    device = bind(WgpuDevice)()
    dry = work(device.dry_run())
    assert dry == work(device) and dry[0] == 4


# ---- kept for good -------------------------------------------------------------------------------
@pytest.mark.parametrize("format", ["nf4 double", "q6_k", "nf4 stack"])
def test_one_that_is_kept_is_decoded_once_to_the_same_bits(device: Any, decodes: list[str], format: str) -> None:
    """Inside of recordings and of stretches too, for as long as it lives, or until it is let go."""
    name, _, kind = format.partition(" ")
    weight = weight_of(device, 1, name, kind == "double")
    if kind == "stack":
        weight = NF4Array.stack([weight, weight_of(device, 2)], device)  # type: ignore[assignment, list-item]
    expected = products(device, weight)
    decodes.clear()
    device.trim()  # a free block that is a little larger would be taken
    start = device.memory().in_use_bytes
    foreseen = device.dequantized_bytes(weight, ROWS, np.float16)
    device.keep_dequantized(weight, ROWS, np.float16)
    assert device.memory().in_use_bytes - start == foreseen > 0 and len(decodes) == 1
    x = device.upload(np.ones((ROWS, IN), np.float16))
    with device.capture() as replay, device.caching_dequantized():
        y = device.linear_quantized(x, weight)
    first = device.download(y)
    device.fill(y, 0.0)
    replay.run()
    np.testing.assert_array_equal(device.download(y), first)
    assert same(products(device, weight), expected) and len(decodes) == 1
    del x, y, replay
    device.forget_dequantized()
    assert same(products(device, weight), expected) and len(decodes) == 3
    device.keep_dequantized(weight, ROWS, np.float16)
    before = device.memory().in_use_bytes
    nbytes = weight.nbytes
    del weight
    assert before - device.memory().in_use_bytes >= foreseen + nbytes * (kind != "stack")


def test_one_that_is_decoded_inside_is_not_kept(matrix_device: Any) -> None:
    """As with few rows on tensor cores."""
    weight = weight_of(matrix_device, 1)
    start = matrix_device.memory().in_use_bytes
    assert matrix_device.dequantized_bytes(weight, ROWS, np.float16) == 0
    matrix_device.keep_dequantized(weight, ROWS, np.float16)
    assert matrix_device.memory().in_use_bytes == start


@pytest.mark.parametrize("change", [_write, _transfer, _copy_to_a_view])
def test_one_that_is_kept_must_not_be_written_to(device: Any, change: Callable[[Any, Any, np.ndarray], None]) -> None:
    """Recordings would go on with the values of before. Once it is let go it may."""
    weight, other = weight_of(device, 1), weight_of(device, 2)
    codes, new = weight.arrays()["packed"], device.download(other.arrays()["packed"])
    device.keep_dequantized(weight, ROWS, np.float16)
    with pytest.raises(DeviceError, match="frozen weight whose dequantized values are kept was written to"):
        change(device, codes, new)
    change(device, other.arrays()["packed"], new)  # type: ignore[arg-type]
    device.forget_dequantized()
    change(device, codes, new)


def test_experts_are_kept_too(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_DEQUANTIZE_ROWS", ROWS // 2 - 1)
    monkeypatch.setattr(grouped, "_LEAST_K", OUT // 2)
    experts, start = 2, np.array([0, 7, ROWS], np.int32)
    weight = weight_of(matrix_device, 1, rows=experts * OUT)
    rng = np.random.default_rng(0)
    x, dy = (matrix_device.upload(rng.standard_normal((ROWS, n)).astype(np.float16)) for n in (IN, OUT))

    def found() -> list[np.ndarray]:
        begin = matrix_device.upload(start)
        made = matrix_device.grouped_linear(x, weight, begin), matrix_device.grouped_linear_backward(dy, weight, begin)
        return [matrix_device.download(array) for array in made]

    decodes = launched(matrix_device, monkeypatch, "quantize_decode")
    expected = found()
    assert len(decodes) == 2
    assert matrix_device.dequantized_bytes(weight, ROWS, np.float16, experts) == size_class(2 * experts * OUT * IN)
    matrix_device.keep_dequantized(weight, ROWS, np.float16, experts)
    assert same(found(), expected) and len(decodes) == 3


@pytest.mark.parametrize(
    ("rows", "vocab", "need_dx", "kinds"),
    [(150, 96, True, [True, True, False, False]), (150, 96, False, [True, False]), (384, 272, True, [True, True])],
)
def test_an_output_layer_is_kept_in_blocks_with_the_same_loss(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, rows: int, vocab: int, need_dx: bool, kinds: list[bool]
) -> None:
    """Two chunks of tokens, the last of which is too short for blocks; and three that are computed at once.

    kinds: which matmuls are with blocks.
    """
    monkeypatch.setattr(gemm_matrix, "LARGE", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    monkeypatch.setattr(gemm_matrix, "TWO_AT_ONCE", SMALL_TWO)
    monkeypatch.setattr(gemm_matrix, "OF_HEADS", SMALL_TWO)
    monkeypatch.setattr(gemm_matrix, "_MIN_K_PER_SPLIT", 128)
    monkeypatch.setattr(gemm_matrix, "_WANTED_MEDIUM", 32)  # 128 rows have two splits, more rows would have one
    device, rng = matrix_device, np.random.default_rng(0)
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 128 * vocab)
    x = device.upload(rng.standard_normal((rows, 64)).astype(np.float16))
    targets = device.upload(rng.integers(0, vocab, rows).astype(np.int32))
    memory = device.upload(rng.standard_normal((vocab + 1) * 64).astype(BF16))
    head = device.view(memory, (vocab, 64), 64)

    def results(head: Any = head) -> list[np.ndarray]:
        made = device.linear_cross_entropy(x, head, targets, need_dx=need_dx)
        return [device.download(array) for array in made if array is not None]

    expected = results()
    assert device.dequantized_bytes(head, rows, x.dtype) == size_class(2 * head.size)
    assert not device.dequantized_bytes(head, 64, x.dtype) and not device.dequantized_bytes(head, rows, np.float32)
    assert not device.dequantized_bytes(device.view(head, (88, 64)), rows, x.dtype)
    device.keep_dequantized(head, rows, x.dtype)
    in_blocks, launch = list[bool](), gemm.launch

    def noted(device: Any, chosen: plan.Plan, *given: Any) -> None:
        in_blocks.append(chosen.gemm.in_blocks)
        launch(device, chosen, *given)

    monkeypatch.setattr(gemm, "launch", noted)
    assert same(results(), expected) and len(expected) == 1 + need_dx
    assert in_blocks == kinds
    in_blocks.clear()
    assert not same(results(device.view(memory, (vocab, 64))), expected) and not any(in_blocks)
    with pytest.raises(DeviceError, match="was written to"):
        device.copy(device.upload(np.zeros((vocab, 64), BF16)), head)
    device.forget_dequantized()
    in_blocks.clear()
    assert same(results(), expected) and not any(in_blocks)


def test_blocks_are_left_where_a_matmul_is_not_in_float16(matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias, the gradients of the logits are in float32. Tensor cores may be turned off later (`turn_off`)."""
    dry, launch, found = matrix_device.dry_run(), gemm.launch, list[bool]()

    def noted(device: Any, chosen: plan.Plan, *given: Any) -> None:
        found.append(chosen.gemm.in_blocks)
        launch(device, chosen, *given)

    def in_blocks(dtype: Any, bias: Any = None) -> list[bool]:
        found.clear()
        dry.linear_cross_entropy(dry.empty((90, 64), dtype), head, targets, bias=bias, need_dbias=bias is not None)
        return list(found)

    monkeypatch.setattr(gemm, "launch", noted)
    head, targets = dry.empty((96, 64), BF16), dry.zeros((90,), np.int32)
    dry.keep_dequantized(head, 90, np.float16)
    assert in_blocks(np.float16) == [True, True]
    assert in_blocks(np.float16, dry.zeros((96,))) == [True, False]
    assert in_blocks(np.float32) == [False, False]
    monkeypatch.setattr(dry, "matrix_units", False)
    assert not any(in_blocks(np.float16))


def test_only_output_layers_that_tensor_cores_round_are_kept(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = matrix_device

    def nbytes(vocab: int = 96, width: int = 64, dtype: Any = BF16) -> int:
        head = device.empty((vocab, width), dtype)
        before = device.memory().in_use_bytes
        device.keep_dequantized(head, 150, np.float16)
        taken = device.memory().in_use_bytes - before
        device.forget_dequantized()
        assert taken == device.dequantized_bytes(head, 150, np.float16)
        return taken

    assert nbytes() == size_class(2 * 96 * 64)
    assert not (nbytes(88) or nbytes(width=72) or nbytes(dtype=np.float16) or nbytes(dtype=np.float32))
    for most, is_kept in ((2 * 96 * 64, True), (2 * 96 * 64 - 1, False)):
        monkeypatch.setattr(device, "max_binding_bytes", most)
        assert bool(nbytes()) == is_kept
    monkeypatch.undo()
    monkeypatch.setattr(device, "matrix_units", False)
    assert not nbytes()


def test_as_many_whole_chunks_as_fit_a_binding_are_computed_at_once() -> None:
    def chunks(n: int, most: int) -> int:
        return loss._chunks_at_once(SimpleNamespace(max_binding_bytes=4 * 96 * 128 * most), n, 128, 96)  # type: ignore[arg-type]

    assert [chunks(128 * n, 9) for n in (12, 9, 6, 7)] == [4, 3, 3, 1] and chunks(128 * 12 + 1, 9) == 1
    assert [chunks(128 * 12, most) for most in (4, 3, 2, 1)] == [4, 3, 2, 1]
