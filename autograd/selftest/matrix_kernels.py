"""Cases of every kernel of GEMMs and attention in a training step, for devices that choose kernels by dtype, alignment
and number of compute units. A case with one compute unit takes the tiles of large GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from wgrad.autograd.selftest import attention, gemm, linear
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import BF16, F16, F32, Case
from wgrad.autograd.selftest.experts import grouped_case
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.linear import frozen_case
from wgrad.device.formats.frozen_weight import formats

DECODED_IN_MATMULS = ("nf4", "q8_0")  # formats that GEMMs of several rows decode, on devices that choose kernels


def on_one_unit(case: Case) -> Case:
    return replace(case, name=f"{case.name}/one compute unit", compute_units=1)


def kernel_cases() -> list[Case]:
    """Return a small set of small cases that reach every kernel. The check of a device runs them all."""
    found = [*_float32()]
    for t in (F16, BF16):
        tiled = [*_products(t), *_frozen(t, t)]
        found += [*tiled, *map(on_one_unit, tiled), *_frozen(t, F32), *_frozen(F32, t), *_attention(t), *_unaligned(t)]
        found += [*_restored(t), *_experts(t)]
    return found


def bfloat16_cases() -> list[Case]:
    """Return the self-test's cases in bfloat16, for operators that have kernels for it."""
    return [case for family in (gemm, linear, attention) for case in family.cases(BF16)]


def _experts(t: np.dtype) -> list[Case]:
    """Return cases of grouped GEMMs with weights of dtype t, and of each format that they decode."""
    kinds = [("", False), ("nf4", False), ("nf4", True), ("q8_0", False), ("mxfp4", False)]
    return [
        grouped_case(side, "aligned", (9, 3, 2, 40, 72), t, format=format, double=double, weight=t)
        for format, double in kinds
        for side in ("forward", "backward")
    ]


def _layouts() -> Iterator[dict[str, bool]]:
    for trans_a, trans_b in ((False, False), (False, True), (True, False)):
        yield {"trans_a": trans_a, "trans_b": trans_b}


def _products(t: np.dtype) -> list[Case]:
    return [gemm_case("aligned", 40, 136, 72, t, **layout) for layout in _layouts()]


def _unaligned(t: np.dtype) -> list[Case]:
    """Return cases of rows that no vector divides, also with the head's bfloat16 weight and LoRA's float32 ones."""
    found = [gemm_case("unaligned", 41, 75, 67, t, **layout) for layout in _layouts()]
    for other in (BF16, F32):
        if other != t:
            found += [gemm_case("mixed aligned", 72, 136, 72, t, other, dtype=F32, **layout) for layout in _layouts()]
    return found


def _frozen(x: np.dtype, y: np.dtype) -> list[Case]:
    """Return cases of each format that GEMMs decode, in both directions. x, y: dtypes of x and the result."""
    return [
        frozen_case(format, f"aligned to {y.name}", 41, 136, 64, x, dtype=y, backward=backward, double=double)
        for format, double in _weights()
        if format in DECODED_IN_MATMULS
        for backward in (False, True)
    ]


def _restored(t: np.dtype) -> list[Case]:
    """Return cases of each other format, whose weight is decoded as a whole for a dense GEMM."""
    others = [format for format, _ in _weights() if format not in DECODED_IN_MATMULS]
    return [frozen_case(format, f"aligned to {t.name}", 41, 136, 64, t, dtype=t) for format in others]


def _weights() -> list[tuple[str, bool]]:
    """Return (format, double) for each kind of weight."""
    return [(format, False) for format in formats()] + [("nf4", True)]


def _attention(t: np.dtype) -> list[Case]:
    """Return cases of each width, and of keys or queries that are split to keep the whole GPU busy."""
    found = [
        attention_case("width", (1, 37, 2, 1, width), t, backward=backward)
        for width in (64, 128, 256)
        for backward in (False, True)
    ]
    return [*found, attention_case("shares", (1, 5, 2, 1, 64), t, keys=800, cache_len=795)]


def _float32() -> list[Case]:
    found = [*_frozen(F32, F32), *_restored(F32)]
    found += [frozen_case(format, "one row", 1, 136, 64, F32, double=double) for format, double in _weights()]
    found += [gemm_case("aligned", 72, 136, 72, F32, **layout) for layout in _layouts()]
    found += [gemm_case("unaligned", 41, 75, 67, F32, **layout) for layout in _layouts()]
    for rank in (16, 64):
        found += [
            gemm_case("lora", 72, rank, 136, F32, trans_b=True),
            gemm_case("lora", 72, rank, 136, F32),
            gemm_case("lora", rank, 136, 72, F32, trans_a=True),
        ]
    return found
