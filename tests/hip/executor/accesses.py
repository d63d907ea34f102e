"""hip_access_counts: what kernels do in memory, counted on the emulated GPU (tests/hip/emulator/counts.cpp).

A row is one kernel in the calls of one family, on arrays of one type: launches, cycles of LDS accesses and the least
possible, lines of global memory touched and the least possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from tests.autograd import norms
from tests.hip.emulator.harness import Counts, Emulator, start
from tests.hip.executor.table import Object, Row
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_quantize import ROUNDED

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
    d.add(a, a), d.scale(a, 2.0), d.bias(a, x(COLUMNS, dtype=np.float32)), d.cast(a, np.float32)
    d.mask(a, d.upload(np.ones((ROWS, COLUMNS), np.uint32)), -1.0)


def activation(d: Any, x: Arrays) -> None:
    a, b, c = x(ROWS, COLUMNS), x(ROWS, COLUMNS), x(ROWS, COLUMNS)
    d.swiglu(a, b), d.geglu_backward(a, b, c)


def log_odds(d: Any, x: Arrays) -> None:
    a = x(ROWS, COLUMNS)
    d.log_odds(a), d.log_odds_backward(a, a)


def norm(d: Any, x: Arrays) -> None:
    for op in norms.NORMS:
        a = {n: x(ROWS, COLUMNS) for n in norms.ROWS} | {n: x(COLUMNS, dtype=np.float32) for n in norms.COLUMNS}
        norms.backward(op, d, a | norms.forward(op, d, a))


def qk_norm(d: Any, x: Arrays) -> None:
    for op in norms.NORMS:
        norms.forward(op, d, {"x": x(ROWS * 3, 64)} | {n: x(64, dtype=np.float32) for n in norms.COLUMNS})


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
    weight = d.quantize(x(ROWS * 8, COLUMNS), 64, double=True)
    d.dequantize(weight, x.dtype)
    d.dequantize(d.quantize(x(ROWS * 8, COLUMNS), 64), x.dtype)


def rounding(d: Any, x: Arrays) -> None:
    w = x(ROWS, 2304, dtype=np.float32)
    for format in ROUNDED:
        empty = formats()[format].quantize(np.zeros(w.shape, np.float32))
        places = {name: d.upload(array) for name, array in empty.arrays().items()}
        d.round_weight(w, replace(empty, **places))  # type: ignore[type-var]


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
    d.sample(x(VOCAB * 8, dtype=np.float32), uniform, d.upload(sample_settings(0.7, 5, 0.9)[None]))


def products(d: Any, x: Arrays) -> None:
    a, b = x(136, 200), x(72, 200)
    d.gemm(a, b, trans_b=True), d.gemm(a, x(200, 72)), d.gemm(a, x(136, 72), trans_a=True)
    weight = d.quantize(x(136, 256, dtype=np.float32), 64)
    d.linear_quantized(x(72, 256), weight), d.linear_quantized_backward(x(72, 136), weight)
    d.linear_quantized(x(1, 256), weight), d.gemm(x(1, 200), b, trans_b=True)


def skinny(d: Any, x: Arrays) -> None:
    """LoRA's products, whose matrices are float32, of both widths of gemm_skinny.hip."""
    for rank in (8, 64):
        a, b = x(rank, 200, dtype=np.float32), x(200, rank, dtype=np.float32)
        d.gemm(x(136, 200), a, trans_b=True, dtype=np.float32)
        d.gemm(x(136, 200), b, dtype=np.float32)
        d.gemm(x(200, 136), b, trans_a=True, dtype=np.float32)


def attention(d: Any, x: Arrays) -> None:
    """Run attention and its backward, in float16 on tensor cores."""
    for width in (64, 128, 256) if x.dtype == np.float16 else (64,):
        q, k, v, do = (x(1, 40, heads, width) for heads in (4, 2, 2, 4))
        doc_start = d.upload(np.zeros((1, 40), np.int32))
        o, lse = d.attention(q, k, v, doc_start, d.upload(np.zeros(1, np.int32)), scale=0.125)
        d.attention_backward(do, q, k, v, o, lse, doc_start, scale=0.125)


FAMILIES = [elementwise, activation, norm, qk_norm, softmax, rope, reduce, embedding, cross_entropy, nf4, rounding,
            optimizer, dropout, storage, decoding, products, skinny, attention, log_odds]  # fmt: skip
DTYPES = {"float32": np.float32, "float16": np.float16}


def counting(emulator: Emulator, architecture: str) -> Any:
    """A device that counts, with the kernels that the families launch: clang takes half a second for each."""
    device, wanted = emulator.counting(architecture), set[str]()
    for family in FAMILIES:
        for dtype in DTYPES.values():
            dry = device.dry_run()
            family(dry, Arrays(dry, dtype))
            wanted |= {kernel for _, kernel in dry.kernels}
    return emulator.counting(architecture, only=wanted)


def count(emulator: Emulator, device: Any, family: Callable[[Any, Arrays], None], dtype: str) -> dict[str, Counts]:
    """Count the accesses of a family's kernels, by name. device: one of `emulator.counting`."""
    return emulator.count(lambda: family(device, Arrays(device, DTYPES[dtype])))


def as_row(kernel: str, counts: Counts) -> Row:
    """launches; [LDS cycles, least]; [cache lines, least]."""
    return {"kernel": kernel, "launches": counts.launches, "lds": [*counts.total("lds")],
            "lines": [*counts.total("global")]}  # fmt: skip


@cache
def emulator() -> Emulator:
    """One for all rows."""
    kept = os.environ.get("WGRAD_EMULATOR_DIR")
    return start(Path(kept or mkdtemp(prefix="wgrad-emulator-")))


def rows(made: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
    """Those of the kernels of one code object, in every family that launches one of them."""
    device, found = counting(emulator(), made.architecture), []
    for family in FAMILIES:
        for dtype in DTYPES:
            dry = device.dry_run()
            family(dry, Arrays(dry, DTYPES[dtype]))
            if made.source not in {source for source, _ in dry.kernels}:
                continue
            about = {"family": family.__name__, "dtype": dtype}
            counts = count(emulator(), device, family, dtype)
            found += [about | as_row(kernel, n) for kernel, n in counts.items() if kernel in kernels]
            say(f"{family.__name__} {dtype}: {len(counts)} kernels")
    return found
