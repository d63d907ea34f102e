"""No launch of any operator takes long on a GPU that is not known: a walk over the registry, with long sequences.

Whole steps are in tests/train/test_step_counts.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wgrad.wgsl
from wgrad.autograd.bench import entry as bench_entry
from wgrad.autograd.bench import experts, products
from wgrad.autograd.bench.cost import cost
from wgrad.autograd.bench.delta_rule import entries as recurrences
from wgrad.autograd.bench.entries import entries_of, operator_names
from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry
from wgrad.autograd.bind import bind
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.nf4 import NESTED_BLOCK_SIZE
from wgrad.wgsl.device import DryRunDevice
from wgrad.wgsl.formats.quantize import _ROUNDING
from wgrad.wgsl.gemm.gemm_matrix_lora import MOST_RANK
from wgrad.wgsl.planned_gpu import PlannedGpu
from wgrad.wgsl.runtime.submission_size import LEAST_WORK_GPU

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
SECONDS, BYTES_PER_SECOND = 0.2, 25e9  # of a GPU of 0.5 TFLOP/s
TOKENS, HIDDEN, WIDE, VOCAB = 32_768, 4096, 14_336, 128_256
RANK = 64  # the largest that one launch takes
SOFTWARE_ONLY = {"gemm_direct"}
MEASURING = {"cooperative_probe", "roof", "roof_int8", "roof_matrix"}
COPIES = {"fill", "transfer", "elementwise_copy", "gemm_matrix_blocks"}


class _Long(Sizes):
    @property
    def tokens(self) -> int:
        return self.rows


SIZES = _Long(
    "long", TOKENS, HIDDEN, (HIDDEN,), (TOKENS, WIDE, HIDDEN), (16, 256),
    ((1, TOKENS // 4, 32, 8, 128), (1, TOKENS, 16, 2, 256), (1, TOKENS, 32, 8, 128)),  # the first stores ds
    TOKENS, (TOKENS, VOCAB, HIDDEN), (128, 8, 768, 2048), 1 << 20,
)  # fmt: skip
ONE_TOKEN = _Long(
    "one token", 1, HIDDEN, (), (1, WIDE, HIDDEN), (), SIZES.attention[-1:], 1, (1, VOCAB, HIDDEN), SIZES.experts, 1
)  # fmt: skip


class Noting(DryRunDevice):
    """Notes (shader, work, bytes of its arrays) of each launch."""

    dispatch_work = LEAST_WORK_GPU
    noted: list[tuple[str, float, int]]

    def launch(self, shader: str, arrays: Any, params: Any, *_: Any, work: float = 0.0, **__: Any) -> None:
        self.noted.append((shader, work, sum(array.nbytes for array in arrays if array is not None)))


@cache
def frozen(name: str, n: int, k: int) -> Any:
    """Return a frozen weight that has shapes and no values."""
    kind: Any = formats()[name]
    if name != "nf4":
        return kind.empty((n, k), lambda shape, dtype: np.broadcast_to(np.zeros((), dtype), shape))
    rows = math.lcm(k, 64 * NESTED_BLOCK_SIZE) // k
    few = kind.quantize(np.ones((rows, k), np.float32), 64, True)
    grown = {part: few.arrays()[part] for part in ("packed", "absmax", "nested_absmax")}
    return replace(few, **{part: np.resize(a, (a.size * n // rows,)) for part, a in grown.items()}, shape=(n, k))


def with_state(op: str, build: Callable[[Any], dict[str, Any]], device: Any) -> dict[str, Any]:
    """Return arguments of a step while decoding."""
    _, _, heads, _, width = ONE_TOKEN.attention[-1]
    return {**build(device), "state": device.empty((1, heads, width // 2 if op == "ssd" else width, width))}


def more_entries(dtype: np.dtype) -> Iterator[Entry]:
    """Yield entries that the bench lacks: tokens one by one, a rounded head, one in blocks, casts to float32,
    and LoRA's gradients at few ranks."""
    yield entry("linear_cross_entropy", (TOKENS, VOCAB, HIDDEN), dtype, partial(kept_head, dtype), "kept")
    yield entry("lora_grads", (TOKENS, 2 * WIDE, MOST_RANK), dtype, partial(lora_grads, dtype), "few ranks")
    for one in recurrences(ONE_TOKEN, dtype):
        if one.op in ("delta_rule", "ssd"):
            yield replace(one, build=partial(with_state, one.op, one.build))
    yield entry("cast", (TOKENS, HIDDEN), BF16, lambda d: {"x": d.empty((TOKENS, HIDDEN), BF16), "dtype": F32}, "wider")
    yield entry("embedding_backward", (8 * TOKENS, VOCAB, 576), F32, many_ids)
    for name in _ROUNDING:
        yield entry("round_weight", (VOCAB, HIDDEN), F32, partial(head, name), name)


def kept_head(dtype: np.dtype, device: Any) -> dict[str, Any]:
    """Return arguments of a loss whose head is kept in blocks on tensor cores."""
    weight = device.empty((VOCAB, HIDDEN), BF16)
    device.keep_dequantized(weight, TOKENS, dtype)
    return {"x": device.empty((TOKENS, HIDDEN), dtype), "weight": weight, "targets": device.empty((TOKENS,), np.int32)}


def lora_grads(dtype: np.dtype, device: Any) -> dict[str, Any]:
    """Return arguments of the gradients of LoRA's factors on gate and up."""
    dy, b = device.empty((TOKENS, 2 * WIDE), dtype), device.empty((2 * WIDE, MOST_RANK))
    return {"dy": dy, "b": b, "u": device.empty((TOKENS, 2 * MOST_RANK)), "parts": (WIDE, WIDE)}


def head(name: str, device: Any) -> dict[str, Any]:
    """Return arguments that round a large head to a format."""
    kind: Any = formats()[name]
    return {"w": device.empty((VOCAB, HIDDEN)), "out": kind.empty((VOCAB, HIDDEN), device.empty)}


def many_ids(device: Any) -> dict[str, Any]:
    """Return arguments of the gradient of a small model's table with 8 sequences."""
    tokens, columns = 8 * TOKENS, 576
    return {
        "dy": device.empty((tokens, columns)), "ids": device.empty((tokens,), np.int32), "vocab_size": VOCAB
    }  # fmt: skip


MODES: dict[str, tuple[np.dtype, dict[str, Any]]] = {
    "float32": (F32, {}),
    "float16": (F16, {}),
    "tensor cores": (F16, {"matrix_units": True, "stacks_weights": True}),
    "8 bits": (F32, {"int8_products": True}),
}


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Iterator[tuple[Entry, Noting, float]]]:
    """Calls each entry of the bench on a device on which nothing runs: (entry, device, FLOP of the call)."""
    resize = lambda a, shape: np.broadcast_to(np.ravel(a)[:1].reshape(()), shape)  # noqa: E731 - takes no memory
    monkeypatch.setattr(np, "resize", resize)
    monkeypatch.setattr(products, "RANK", RANK)
    monkeypatch.setattr(products, "_quantized", frozen)
    monkeypatch.setattr(bench_entry, "_BLOCK", 1)
    ids = lambda device, sizes: device.empty((sizes.tokens, sizes.experts[1]), np.int32)  # noqa: E731
    monkeypatch.setattr(experts, "_ids", ids)

    def calls(mode: str) -> Iterator[tuple[Entry, Noting, float]]:
        dtype, options = MODES[mode]
        gpu = PlannedGpu()
        vars(gpu).update({"workgroup_bytes": 48 << 10, **options})
        device = bind(Noting)(gpu)
        for one in (*entries_of(SIZES, dtype), *more_entries(dtype)):
            device.noted = []
            given = one.build(device)
            device.noted = []
            made = getattr(device, one.op)(**given)
            yield one, device, cost(one.op, given, made).flop

    return calls


def test_rounding_declares_all_scales_that_it_tries() -> None:
    """For each, an element is scaled, rounded and bounded on two sides, and adds to two weighted sums: 9 FLOP."""
    for name, scales in {"q4_k": 21, "q6_k": 19}.items():
        assert _ROUNDING[name][2] >= 9 * scales, name


def test_no_launch_of_any_operator_takes_long(walk: Callable[[str], Iterator[tuple[Entry, Noting, float]]]) -> None:
    """At most 200 ms on a GPU of 0.5 TFLOP/s and 25 GB/s, and what a launch declares is what the operator computes."""
    assert LEAST_WORK_GPU == SECONDS * 0.5e12
    called, shaders, wrong = set[str](), set[str](), list[str]()
    for mode in MODES:
        for one, device, flop in walk(mode):
            called.add(one.op)
            total = Counter[str]()
            for shader, work, _ in device.noted:
                total[shader] += work  # type: ignore[assignment]
            for shader, work, nbytes in device.noted:
                shaders.add(shader)
                share = work / total[shader] if total[shader] else 1.0  # of the arrays, of a launch in parts
                if work > LEAST_WORK_GPU or share * nbytes > SECONDS * BYTES_PER_SECOND:
                    wrong.append(f"{mode}: {one.name}: {shader} has {work:.2g} FLOP and {share * nbytes:.2g} bytes")
            if one.op == "embedding_backward":  # each token is compared with all others
                flop = 2.0 * int(one.shape.partition("x")[0]) ** 2
            if one.op == "attention_backward" and sum(total.values()) > 1.5 * flop:  # also where it is in parts
                wrong.append(f"{mode}: {one.name} declares {sum(total.values()):.2g} for {flop:.2g} FLOP")
            # Of the loss, a dry run launches the first chunks and the last. All formats but Q4_K round in less.
            other = one.op == "linear_cross_entropy" or (one.op == "round_weight" and one.variant != "q4_k")
            if flop > LEAST_WORK_GPU / 10 and not other and sum(total.values()) < flop / 2:
                wrong.append(f"{mode}: {one.name} declares {sum(total.values()):.2g} of {flop:.2g} FLOP")
    assert not wrong, "\n".join(wrong)
    assert called == set(operator_names())
    all_shaders = {path.stem for path in Path(wgrad.wgsl.__path__[0]).glob("*/*.wgsl") if ".inc" not in path.name}
    assert all_shaders - shaders <= SOFTWARE_ONLY | MEASURING | COPIES, all_shaders - shaders
