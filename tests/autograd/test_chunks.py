"""A stretch in chunks of rows: the values and gradients of the whole, less memory, and nothing computed for nobody."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.wgsl.launches import launched
from wgrad.autograd import functional as F
from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.chunks import even_rows, in_row_chunks
from wgrad.autograd.offload import Offloading
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.tensor import Tensor, no_grad, parameter
from wgrad.device.formats.nf4 import NF4Array

N, C, WIDE = 200, 7, 50


def leaves(device: Any, rng: np.random.Generator) -> list[Tensor]:
    """x [N, C], and the two weights of a stretch; float64."""
    shapes = (N, C), (WIDE, C), (C, WIDE)
    return [parameter(device.upload(rng.standard_normal(shape)), device) for shape in shapes]


def stretch(up: Tensor, down: Tensor, calls: list[int] | None = None) -> Any:
    def fn(x: Tensor) -> Tensor:
        if calls is not None:
            calls.append(x.shape[0])
        return F.add(x, F.gemm(F.silu(F.gemm(x, up, trans_b=True)), down, trans_b=True))

    return fn


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("inside", [False, True])
def test_values_and_gradients_are_those_of_the_whole(cpu: ReferenceDevice, rows: int, inside: bool) -> None:
    """Also where it ends a checkpointed stretch, below other work and with more work above."""
    results = []
    for chunked in (False, True):
        x, up, down = leaves(cpu, np.random.default_rng(0))
        fn = stretch(up, down)

        def layer(t: Tensor, fn: Any = fn, chunked: bool = chunked) -> Tensor:
            t = F.silu(t)
            return in_row_chunks(fn, t, rows) if chunked else fn(t)

        y = checkpoint(layer, x) if inside else layer(x)
        F.sum(F.mul(y, y)).backward()
        results.append([np.asarray(a) for a in (y.data, x.gradient, up.gradient, down.gradient)])
    for value, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)


def test_a_gradient_takes_the_place_of_what_nothing_else_reads(cpu: ReferenceDevice) -> None:
    """The same gradients, from chunks of which the last is shorter; and x's memory has x's gradient."""
    results = []
    for spent in (False, True):
        x, up, down = leaves(cpu, np.random.default_rng(0))
        t = F.silu(x)
        before, memory = np.array(t.data), t.data
        F.sum(in_row_chunks(stretch(up, down), t, 128, spent=spent)).backward()
        results.append([np.asarray(a) for a in (x.gradient, up.gradient, down.gradient)])
        assert np.array_equal(memory, before) != spent
    for value, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_the_output_is_not_made_again_for_nobody(cpu: ReferenceDevice) -> None:
    """Forward, then one recomputation in the backward: in a checkpoint too."""
    x, up, down = leaves(cpu, np.random.default_rng(0))
    calls: list[int] = []
    y = checkpoint(lambda t: in_row_chunks(stretch(up, down, calls), F.silu(t), 128), x)
    assert calls == [128, 72]
    F.sum(y).backward()
    assert calls == [128, 72] * 2


def test_chunks_keep_nothing_for_a_recomputation(cpu: ReferenceDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves them out, so a product with A that they kept would only take memory."""
    x, up, down = leaves(cpu, np.random.default_rng(0))
    moved, weight = list[tuple[int, ...]](), cpu.zeros((C, C))
    monkeypatch.setattr(cpu, "transfer", lambda src, out: moved.append(src.shape))
    term = F.LoraTerm(up, Tensor(cpu.zeros((C, WIDE)), cpu, True), 1.0)
    fn = partial(F.linear, weight=weight, lora=term)
    checkpoint(
        lambda t: in_row_chunks(fn, F.linear(t, weight, lora=term), 128), x, keep=True, offloading=Offloading(cpu, 1)
    )
    assert moved == [x.shape, (x.shape[0], WIDE)]


def test_without_a_tape_it_is_computed_and_nothing_kept(cpu: ReferenceDevice) -> None:
    x, up, down = leaves(cpu, np.random.default_rng(0))
    with no_grad():
        y = in_row_chunks(stretch(up, down), x, 64)
        np.testing.assert_allclose(y.numpy(), stretch(up, down)(x).numpy(), rtol=1e-13)
    assert not y.requires_grad


def test_what_is_made_on_the_way_never_stands_for_all_rows(cpu: ReferenceDevice) -> None:
    x, up, down = (Tensor(cpu.upload(np.ones(s)), cpu, True) for s in ((4096, C), (WIDE, C), (C, WIDE)))
    start = cpu.memory().in_use_bytes
    y = in_row_chunks(stretch(up, down), x, 64)
    y.backward(cpu.upload(np.ones((4096, C))))
    assert cpu.memory().peak_bytes - start < 4096 * WIDE * 8


def test_a_weight_is_decoded_once_a_pass(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every chunk; the bits are the same, and nothing is kept from the forward for the backward."""
    device, rng = wgpu_device, np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((N, 64), (96, 64), (64, 96))]
    up, down = (NF4Array.quantize(value).map_arrays(device.upload) for value in values[1:])
    decodes = launched(device, monkeypatch, "quantize_decode")

    def fn(t: Tensor) -> Tensor:
        return F.linear_quantized(F.silu(F.linear_quantized(t, up)), down, residual=t)

    def run() -> tuple[list[int], list[np.ndarray]]:
        """Return the numbers of decodes up to the end of the forward and of the backward, and y and dx."""
        decodes.clear()
        x = Tensor(device.upload(values[0]), device, requires_grad=True)
        start = device.memory().in_use_bytes
        y = in_row_chunks(fn, x, 128)
        counts = [len(decodes)]
        assert device.memory().in_use_bytes - start < 2 * y.data.nbytes
        F.sum(F.mul(y, y)).backward()
        return [*counts, len(decodes)], [device.download(array) for array in (y.data, x.gradient)]

    counts, found = run()
    assert counts == [2, 4]
    monkeypatch.setattr(device, "caching_dequantized", nullcontext)
    counts, expected = run()
    assert counts == [4, 12]  # of two chunks; without an operator's `unread` the backward makes down's product again
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_chunks_are_even() -> None:
    for rows in (1, 63, 64, 65, 4097, 8192, 32768, 100_000):
        for most in (1, 64, 100, 1170, 5000):
            each = even_rows(rows, most)
            chunks = -(-rows // each)
            assert each % 64 == 0 and chunks <= -(-rows // max(most, 64)) and each < most + 64 or most < 64
    assert even_rows(8192, 1170) == 1024 and even_rows(32768, 2048) == 2048


def test_gradients_weighed_in_chunks_of_rows_have_the_same_bits(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a loss per target is weighed row by row, a few rows at a time: the same bits as at once."""
    rng, found = np.random.default_rng(0), []
    x, table, seeds = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, 12), (31, 12), (N,)))
    targets = device.upload(rng.integers(0, 31, N).astype(np.int32))
    for rows in (64, 4096):
        monkeypatch.setattr("wgrad.autograd.ops.loss.WEIGHED_ROWS", rows)
        leaf = Tensor(device.upload(x), device, requires_grad=True)
        losses = F.linear_cross_entropy(leaf, device.upload(table), targets, per_target=True)
        losses.backward(device.upload(seeds))
        found.append(device.download(leaf.gradient))
    assert np.ptp(found[0]) > 0
    np.testing.assert_array_equal(*found)
