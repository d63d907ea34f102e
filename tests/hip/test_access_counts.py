"""LDS bank conflicts and uncoalesced accesses: the counter finds what is planted, and our kernels keep their counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLANTED = """
#include "gpu.hpp"
using namespace gpu;
extern "C" GPU_KERNEL(256) void lds_stride(float* y, u32 stride) {  // word `stride` * lane of a wave's own 2048
  GPU_SHARED(float, memory, 2112);
  if (thread() < GPU_WAVE) memory[lane() * stride] = 1.f;
  barrier();
  if (thread() < GPU_WAVE) y[thread()] = memory[lane() * stride];
}
extern "C" GPU_KERNEL(64) void lds_wide(float* y, u32 stride) {  // 16 bytes a lane, `stride` words apart
  GPU_SHARED(u32x4, memory, 1024);
  for (u32 i = thread(); i < 1024; i += 64) memory[i] = u32x4{i, i, i, i};
  barrier();
  u32x4 v = load16(memory + thread() * stride / 4);
  store16(y + thread() * 4, v);
}
extern "C" GPU_KERNEL(64) void global_stride(const float* x, float* y, u32 stride, u32 shift) {
  y[thread()] = x[thread() * stride + shift];
}
extern "C" GPU_KERNEL(64) void wide(const float* x, float* y) { store16(y + thread() * 4, load16(x + thread() * 4)); }
extern "C" GPU_KERNEL(64) void loop(const float* x, float* y, u32 n) {  // lanes leave the loop one after another
  float sum = 0.f;
  for (u32 i = 0; i < n && i <= thread() % GPU_WAVE; i++) sum += x[i * 64 + thread()];
  y[thread()] = sum;
}
"""

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


def reduce(d: Any, x: Arrays) -> None:
    d.sum(x(ROWS, COLUMNS)), d.sum_rows(x(4 * ROWS, COLUMNS))


def embedding(d: Any, x: Arrays) -> None:
    ids = x.ids(VOCAB, ROWS)
    d.embedding(x(VOCAB, COLUMNS), ids, dtype=x.dtype)
    d.embedding_backward(x(ROWS, COLUMNS), ids, VOCAB)


def cross_entropy(d: Any, x: Arrays) -> None:
    d.linear_cross_entropy(x(ROWS, 64), x(VOCAB * 8, 64), x.ids(VOCAB * 8, ROWS), need_dx=True)


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


FAMILIES = [elementwise, activation, norm, qk_norm, softmax, rope, reduce, embedding, cross_entropy, nf4, optimizer, dropout,
            storage, decoding]  # fmt: skip
