"""Bench entries of arithmetic-bound operators: products, frozen weights, attention, the loss."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry, normal
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_blocks import GgufBlocks
from wgrad.device.formats.nf4 import PART_ROWS

RANK = 16  # of LoRA


def entries(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    return [
        *_squares(sizes, dtype),
        *_lora(sizes, dtype),
        *_linear(sizes, dtype),
        *(e for shape in sizes.attention for e in _attention(shape, dtype)),
        _decode(sizes, dtype),
        *_loss(sizes, dtype),
    ]


def _gemm(m: int, n: int, k: int, kinds: tuple[Any, Any], ways: str, variant: str = "", **options: Any) -> Entry:
    def build(device: Device) -> dict[str, Any]:
        a = normal(device, (k, m) if ways[0] == "t" else (m, k), kinds[0])
        b = normal(device, (n, k) if ways[1] == "t" else (k, n), kinds[1], 1)
        return {"a": a, "b": b, "trans_a": ways[0] == "t", "trans_b": ways[1] == "t", **options}

    activations = kinds[0] if kinds[0] != F32 else kinds[1]
    return entry("gemm", (m, n, k), activations, build, f"{variant} {ways}".strip())


def _squares(sizes: Sizes, t: np.dtype) -> list[Entry]:
    all_ways = [_gemm(side, side, side, (t, t), ways) for side in sizes.sides[-1:] for ways in ("nn", "nt", "tn")]
    return [_gemm(side, side, side, (t, t), "nt") for side in sizes.sides[:-1]] + all_ways


def _lora(sizes: Sizes, t: np.dtype) -> list[Entry]:
    m, _, k = sizes.linear
    parts = (max(sizes.linear[1], PART_ROWS),) * 2  # gate and up

    def du(device: Device) -> dict[str, Any]:
        return {
            "dy": normal(device, (m, sum(parts)), t),
            "b": normal(device, (sum(parts), RANK), F32, 1),
            "parts": parts,
        }

    def db(device: Device) -> dict[str, Any]:
        return {"dy": normal(device, (m, sum(parts)), t), "u": normal(device, (m, 2 * RANK), F32, 1), "parts": parts}

    return [
        _gemm(m, RANK, k, (t, F32), "nt", "lora", dtype=F32),
        _gemm(RANK, k, m, (F32, t), "tn", "lora gradient", dtype=F32),
        entry("lora_du", (m, sum(parts), RANK), t, du),
        entry("lora_db", (m, sum(parts), RANK), t, db),
        entry("lora_grads", (m, sum(parts), RANK), t, lambda device: {**du(device), "u": db(device)["u"]}),
    ]


def _linear(sizes: Sizes, t: np.dtype) -> list[Entry]:
    forward, back = "linear_quantized", "linear_quantized_backward"
    m, n, k = sizes.linear
    side = sizes.sides[-1]
    found = []
    for name in ("nf4", *(f for f in formats() if f != "nf4")):
        found += [_frozen(forward, t, name, (m, n, k)), _frozen(forward, t, name, (1, n, k), " one row")]
        found += [_frozen(back, t, name, (m, n, k)), _frozen(back, t, name, (m, n, k), " lowrank", RANK)]
        found += [_frozen(op, t, name, (rows, side, side)) for rows in sizes.few_rows for op in (forward, back)]
    return found


def _frozen(op: str, t: np.dtype, name: str, mnk: tuple[int, int, int], variant: str = "", rank: int = 0) -> Entry:
    m, n, least = mnk
    k = -(-least // formats()[name].block) * formats()[name].block

    def build(device: Device) -> dict[str, Any]:
        weight = _quantized(name, n, k).map_arrays(device.upload)
        if op == "linear_quantized":
            return {"x": normal(device, (m, k), t), "weight": weight}
        lowrank = (normal(device, (m, rank)), normal(device, (rank, k), F32, 1)) if rank else None
        return {"dy": normal(device, (m, n), t), "weight": weight, "lowrank": lowrank}

    return entry(op, (m, n, k), t, build, name + variant)


@lru_cache(2)  # consecutive entries have two shapes of one format
def _quantized(name: str, n: int, k: int) -> Any:
    """Return a frozen weight of a few random rows, which are repeated."""
    rows = min(n, max(1, (1 << 20) // k))
    values = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
    kind = formats()[name]
    if issubclass(kind, GgufBlocks):  # searching a codebook takes long: quantize the few rows
        return kind.quantize(values).repeated(n)
    return kind.quantize(np.resize(values, (n, k)), 64, name == "nf4")


def _attention(shape: tuple[int, int, int, int, int], t: np.dtype) -> list[Entry]:
    b, length, h, g, d = shape
    options = {"scale": d**-0.5}

    def build(device: Device) -> dict[str, Any]:
        q = normal(device, (b, length, h, d), t)
        k, v = (normal(device, (b, length, g, d), t, seed) for seed in (1, 2))
        doc_start = device.upload(np.zeros((b, length), np.int32))
        return {"q": q, "k": k, "v": v, "doc_start": doc_start, "cache_len": device.zeros((1,), np.int32), **options}

    def back(device: Device) -> dict[str, Any]:
        given = build(device)
        o, lse = device.attention(**given)
        del given["cache_len"]
        return {**given, "do": normal(device, (b, length, h, d), t, 3), "o": o, "lse": lse}

    return [entry("attention", shape, t, build, "causal"), entry("attention_backward", shape, t, back, "causal")]


def _decode(sizes: Sizes, t: np.dtype) -> Entry:
    _, _, h, g, d = sizes.attention[-1]

    def build(device: Device) -> dict[str, Any]:
        k, v = (normal(device, (1, sizes.keys, g, d), t, seed) for seed in (1, 2))
        cache_len = device.upload(np.array([sizes.keys - 1], np.int32))
        given = {"doc_start": device.zeros((1, 1), np.int32), "cache_len": cache_len, "scale": d**-0.5}
        return {"q": normal(device, (1, 1, h, d), t), "k": k, "v": v, **given}

    return entry("attention", (1, 1, h, g, d), t, build, f"one of {sizes.keys} keys")


def _loss(sizes: Sizes, t: np.dtype) -> list[Entry]:
    n, v, c = sizes.loss

    def build(device: Device, need_dx: bool = True) -> dict[str, Any]:
        targets = device.upload(np.random.default_rng(0).integers(0, v, n).astype(np.int32))
        return {"x": normal(device, (n, c), t), "weight": normal(device, (v, c), t, 1, 0.1), "targets": targets,
                "need_dx": need_dx}  # fmt: skip

    return [
        entry("linear_cross_entropy", (n, v, c), t, lambda device: build(device, False), "loss only"),
        entry("linear_cross_entropy", (n, v, c), t, build, "dx"),
    ]
