"""LDS bank conflicts and uncoalesced accesses: the counter finds what is planted, and our kernels keep their counts."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLANTED = """
#include "gpu.hpp"
using namespace gpu;
extern "C" GPU_KERNEL(64) void lds_words(float* y, u32 stride) {
  GPU_SHARED(float, memory, 3072);
  for (u32 i = thread(); i < 3072; i += 64) memory[i] = 1.f;
  barrier();
  y[thread()] = memory[lane() * stride];
}
extern "C" GPU_KERNEL(64) void lds_wide(float* y, u32 stride) {
  GPU_SHARED(u32x4, memory, 512);
  for (u32 i = thread(); i < 512; i += 64) store16(memory + i, u32x4{i, i, i, i});
  barrier();
  store16(y + thread() * 4, load16(memory + thread() * stride / 4 % 512));
}
extern "C" GPU_KERNEL(64) void lds_pairs(float* y) {
  GPU_SHARED(u32x4, memory, 512);
  u32 l = thread(), four = l / 4 % 8;  // of each 32 lanes: 0 and 5 read one half of the banks, 1 and 4, ...
  u32 half_of = four < 4 ? 0 : 1, at = l % 4 + 4 * half_of + 8 * (l / 4);
  store16(memory + at, u32x4{l, l, l, l});
  barrier();
  store16(y + l * 4, load16(memory + at));
}
extern "C" GPU_KERNEL(64) void global_words(const float* x, float* y, u32 stride, u32 shift) {
  y[thread()] = x[thread() * stride + shift];
}
extern "C" GPU_KERNEL(64) void global_wide(const float* x, float* y) {
  store16(y + thread() * 4, load16(x + thread() * 4));
}
extern "C" GPU_KERNEL(64) void global_loop(const float* x, float* y) {
  float sum = 0.f;
  for (u32 i = 0; i <= thread() % 3; i++) sum += x[i * 64 + thread()];
  y[thread()] = sum;
}
extern "C" GPU_KERNEL(64) void spill(float* y, u32 n) {
  float kept[64];
  for (u32 i = 0; i < 64; i++) kept[(i * n + thread()) % 64] = float(i);
  y[thread()] = kept[(n * 7 + thread()) % 64];
}
"""
TABLE = Path(__file__).with_name("access_counts.json")

ROWS, COLUMNS, VOCAB = 9, 2112, 301  # a row is whole cache lines; a work-group takes 2048 at a time


class Arrays:
    """Random arrays on a device, by name and shape."""

    def __init__(self, device: Any, dtype: Any) -> None:
        self.device, self.dtype, self.rng = device, dtype, np.random.default_rng(5)

    def __call__(self, *shape: int, dtype: Any = None) -> Any:
        return self.device.upload(self.rng.standard_normal(shape).astype(dtype or self.dtype))

    def ids(self, below: int, *shape: int) -> Any:
        return self.device.upload(self.rng.integers(0, below, shape).astype(np.int32))


def elementwise(d: Any, x: Arrays) -> None:
    a = x(ROWS, COLUMNS)
    d.add(a, a), d.scale(a, 2.0), d.bias(a, x(COLUMNS)), d.cast(a, np.float32)
    d.mask(a, d.upload(np.ones((ROWS, COLUMNS), np.uint32)), -1.0)


def activation(d: Any, x: Arrays) -> None:
    a, b, c = x(ROWS, COLUMNS), x(ROWS, COLUMNS), x(ROWS, COLUMNS)
    d.swiglu(a, b), d.geglu_backward(a, b, c)


def norm(d: Any, x: Arrays) -> None:
    a, dy, w = x(ROWS, COLUMNS), x(ROWS, COLUMNS), x(COLUMNS, dtype=np.float32)
    _, rstd = d.rms_norm(a, w, 1e-5)
    d.rms_norm_backward(dy, a, w, rstd, residual_grad=dy)


def qk_norm(d: Any, x: Arrays) -> None:
    a, w = x(ROWS, 3, 64), x(64, dtype=np.float32)
    _, rstd = d.rms_norm(d.view(a, (ROWS * 3, 64)), w, 1e-5)


def softmax(d: Any, x: Arrays) -> None:
    y = d.softmax(x(ROWS, COLUMNS))
    d.softmax_backward(x(ROWS, COLUMNS), y)


def rope(d: Any, x: Arrays) -> None:
    tables = x(50, 32, dtype=np.float32), x(50, 32, dtype=np.float32)
    d.rope(x(ROWS, 4, 64), *tables, x.ids(50, ROWS))
    new, caches = (x(6, 2, 64), x(6, 2, 64)), (x(2, 40, 2, 64), x(2, 40, 2, 64))
    d.rope_append(*new, *tables, x.ids(50, 6), *caches, d.upload(np.array([7], np.int32)))


def reduce(d: Any, x: Arrays) -> None:
    d.sum(x(ROWS, COLUMNS)), d.sum_rows(x(4 * ROWS, COLUMNS))


def embedding(d: Any, x: Arrays) -> None:
    ids = x.ids(VOCAB, ROWS)
    d.embedding(x(VOCAB, COLUMNS), ids, dtype=x.dtype)
    d.embedding_backward(x(ROWS, COLUMNS), ids, VOCAB)


def cross_entropy(d: Any, x: Arrays) -> None:
    d.linear_cross_entropy(x(ROWS, 64), x(VOCAB * 2 + 6, 64), x.ids(VOCAB, ROWS))


def nf4(d: Any, x: Arrays) -> None:
    weight = d.nf4_quantize(x(ROWS * 8, COLUMNS), 64, double=True)
    d.nf4_dequantize(weight, x.dtype)
    d.nf4_dequantize(d.nf4_quantize(x(ROWS * 8, COLUMNS), 64), x.dtype)


def optimizer(d: Any, x: Arrays) -> None:
    p, g, m, v = (d.zeros((5 * COLUMNS,)) for _ in range(4))
    hyper, state, scale = d.upload(np.ones(4, np.float32)), d.zeros((8,)), d.upload(np.ones(1, np.float32))
    d.clip(d.grad_norm(g), hyper, state, scale, beta1=0.9, beta2=0.99)
    d.adamw(p, g, m, v, hyper, state, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decay_elements=COLUMNS)


def dropout(d: Any, x: Arrays) -> None:
    d.dropout(x(ROWS, COLUMNS), 0.3, d.upload(np.array([1, 2], np.uint32)), 3)


def storage(d: Any, x: Arrays) -> None:
    a = x(ROWS, COLUMNS)
    d.fill(a, 1.0), d.copy(a, x(ROWS, COLUMNS))


def decoding(d: Any, x: Arrays) -> None:
    cache, start = x(2, 40, 2, 64), d.upload(np.array([7], np.int32))
    d.kv_append(cache, x(2, 3, 2, 64), start)
    uniform = d.upload(np.array([0.7], np.float32))
    d.sample(x(VOCAB * 8, dtype=np.float32), uniform, temperature=0.7, top_k=5, top_p=0.9)


def products(d: Any, x: Arrays) -> None:
    a, b = x(136, 200), x(72, 200)
    d.gemm(a, b, trans_b=True), d.gemm(a, x(200, 72)), d.gemm(a, x(136, 72), trans_a=True)
    weight = d.nf4_quantize(x(136, 256, dtype=np.float32), 64)
    d.linear_nf4(x(72, 256), weight), d.linear_nf4_backward(x(72, 136), weight)
    d.linear_nf4(x(1, 256), weight), d.gemm(x(1, 200), b, trans_b=True)


def skinny(d: Any, x: Arrays) -> None:
    """LoRA's products, whose matrices are float32, of both widths of gemm_skinny.hip."""
    for rank in (8, 64):
        a, b = x(rank, 200, dtype=np.float32), x(200, rank, dtype=np.float32)
        d.gemm(x(136, 200), a, trans_b=True, dtype=np.float32)
        d.gemm(x(136, 200), b, dtype=np.float32)
        d.gemm(x(200, 136), b, trans_a=True, dtype=np.float32)


def attention(d: Any, x: Arrays) -> None:
    """On the matrix units in float16."""
    for width in (64, 128) if x.dtype == np.float16 else (64,):
        q, k, v, do = (x(1, 40, heads, width) for heads in (4, 2, 2, 4))
        doc_start = d.upload(np.zeros((1, 40), np.int32))
        o, lse = d.attention(q, k, v, doc_start, d.upload(np.zeros(1, np.int32)), scale=0.125)
        d.attention_backward(do, q, k, v, o, lse, doc_start, scale=0.125)


FAMILIES = [elementwise, activation, norm, qk_norm, softmax, rope, reduce, embedding, cross_entropy, nf4, optimizer,
            dropout, storage, decoding, products, skinny, attention]  # fmt: skip
COMPUTE_BOUND = ("gemm", "gemv", "attention")
DTYPES = {"float32": np.float32, "float16": np.float16}
# Cache lines touched, in the least that the same bytes need. float32 goes in eights of a work-item, which are two
# accesses of 16 bytes at steps of 32: each line is touched twice, and read from memory once.
MOST_LINES = {"float32": 2.05, "float16": 1.05}
MOST_LINES_OF = {
    "elementwise": 3.0,  # bias and mask are read one by one
    "rms_norm": 1.5,  # the weight is float32
    "rms_norm_backward": 1.5,
    "rms_norm_row16": 1.3,
    "rope": 2.0,  # a half of a head is half a line
    "rope_append": 2.0,
    "cross_entropy": 2.15,  # the logits are float32; the wave at a row's end has few lanes
    "embedding_backward": 1.6,  # the gradient is float32
    "embedding_chains": 4.0,  # a search in the ids
    "nf4_quantize": 3.85,  # a work-item takes a piece of 16 bytes of a line or more, one access after another
    "nf4_dequantize": 3.6,
    "nf4_nest": 3.5,  # a search in 255 thresholds
    "grad_norm": 2.0,  # float32
    "sample": 2.2,  # float32
}


@pytest.fixture(scope="module")
def counting(emulator: Any) -> Any:
    """counting(architecture): a device whose kernels count, one for all tests."""
    return cache(emulator.counting)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1100"])
def test_counts_are_those_of_the_table(
    emulator: Any, counting: Any, architecture: str, family: Any, dtype: str
) -> None:
    """Of each kernel: launches, LDS cycles and the least possible, lines of global memory and the least possible."""
    device = counting(architecture)
    found = emulator.count(lambda: family(device, Arrays(device, DTYPES[dtype])))
    for name, counts in found.items():
        cycles, least_cycles = counts.total("lds")
        assert cycles == least_cycles, f"{name}: {cycles} LDS cycles for {least_cycles}"
        if not name.startswith(COMPUTE_BOUND):
            check_coalesced(name, counts, dtype)
    rows = {name: [c.launches, *c.total("lds"), *c.total("global")] for name, c in sorted(found.items())}
    key = f"{architecture} {family.__name__} {dtype}"
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if os.environ.get("WGRAD_WRITE_COUNTS") == "1":
        text = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted({**table, key: rows}.items()))
        TABLE.write_text("{\n" + ",\n".join(text) + "\n}\n")
        return
    assert rows == table.get(key), f"where this is meant, WGRAD_WRITE_COUNTS=1 writes {TABLE.name} anew"


def check_coalesced(name: str, counts: Any, dtype: str) -> None:
    """The bar of a memory-bound kernel."""
    lines, least = counts.total("global")
    most = max(MOST_LINES[dtype], MOST_LINES_OF.get(name, 0.0))
    assert lines <= most * least, f"{name}: {lines} lines for {least}"


# ---- the counter itself --------------------------------------------------------------------------
@pytest.fixture(params=["gfx942", "gfx1100"])
def planted(emulator: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """planted(kernel, arguments): the sites of one launch of a kernel above."""
    (tmp_path / "planted.hip").write_text(PLANTED)
    device = emulator.counting(request.param, tmp_path)
    x, y = device.zeros((4096,)), device.zeros((4096,))

    def launch(kernel: str, *numbers: int, reads: bool = False) -> dict[tuple[str, str], tuple[int, int, int]]:
        arguments = [x, y, *numbers] if reads else [y, *numbers]
        found = emulator.count(lambda: device.launch("planted", kernel, arguments, (1, 1, 1), threads=64))
        return {(s.memory, s.direction): (s.accesses, s.cost, s.least) for s in found[kernel].sites}

    launch.waves = 64 // device.wave  # type: ignore[attr-defined]
    launch.cdna = device.wave == 64  # type: ignore[attr-defined]
    return launch


@pytest.mark.parametrize(("stride", "ways"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (48, 16), (0, 1)])
def test_bank_conflicts_of_words(planted: Any, stride: int, ways: int) -> None:
    """A step of 32 words: 32 lanes in one bank. A step of 0: one word for all, no conflict."""
    assert planted("lds_words", stride)["lds", "load"] == (planted.waves, 2 * ways, 2)


@pytest.mark.parametrize(("stride", "ways"), [(4, 1), (8, 2), (16, 4), (20, 1), (32, 8)])
def test_bank_conflicts_of_128_bits(planted: Any, stride: int, ways: int) -> None:
    """Eight lanes at a time; 20 words is the padded row of 16."""
    assert planted("lds_wide", stride)["lds", "load"] == (planted.waves, 8 * ways, 8)


def test_cdna_takes_128_bit_reads_of_lanes_that_are_not_neighbours(planted: Any) -> None:
    """Lanes 0-3 read where lanes 4-7 do, and 16-19 where 20-23 do: a conflict for groups of neighbours alone."""
    found = planted("lds_pairs")
    assert found["lds", "load"][1:] == ((8, 8) if planted.cdna else (16, 8))
    assert found["lds", "store"][1] == 16  # stores go by neighbours everywhere


@pytest.mark.parametrize(("stride", "shift", "lines"), [(1, 0, 2), (1, 1, 0), (2, 0, 4), (32, 0, 64), (0, 0, 0)])
def test_lines_of_global_memory(planted: Any, stride: int, shift: int, lines: int) -> None:
    """64 words in two lines of 128 bytes; one element on, a line more for each wave; a step of 32, a line a lane."""
    wanted = {(1, 1): 2 + planted.waves, (0, 0): planted.waves}.get((stride, shift), lines)
    accesses, cost, least = planted("global_words", stride, shift, reads=True)["global", "load"]
    assert (accesses, cost, least) == (planted.waves, wanted, 2 if stride else planted.waves)


def test_lines_of_128_bits(planted: Any) -> None:
    for direction in ("load", "store"):
        assert planted("global_wide", reads=True)["global", direction] == (planted.waves, 8, 8)


def test_lanes_that_leave_a_loop_are_not_mixed_up(planted: Any) -> None:
    """Lane l goes round l % 3 + 1 times: each round is one access of the lanes that are still there."""
    assert planted("global_loop", reads=True)["global", "load"][0] == 3 * planted.waves


def test_registers_are_not_counted(planted: Any) -> None:
    assert set(planted("spill", 3)) == {("global", "store")}
