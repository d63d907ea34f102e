"""Bench entries of memory-bound operators that derived.py cannot make, or only with unrealistic sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.bench.derived import derived
from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry, normal
from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.ops.optimizer import HYPER_SIZE, STATE_SIZE
from wgrad.device.contract import PAGE, Device
from wgrad.device.formats.q4_k import Q4KArray

NORMS = ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward")


def entries(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    width_and_heads = ((sizes.rows, sizes.columns), (sizes.rows * sizes.columns // 64, 64))
    found = [e for shape in width_and_heads for op in NORMS for e in derived(op, sizes, dtype, shape)]
    found += [*_rows(sizes, dtype), *_ropes(sizes, dtype), *_fused(sizes, dtype)]
    return found + _float32_only(sizes) if dtype == F32 else found


def _rows(sizes: Sizes, t: np.dtype) -> list[Entry]:
    """Return the entries of the embedding and of the cache of keys and values."""
    tokens, columns, vocab = sizes.tokens, sizes.columns, sizes.loss[1]
    _, _, h, g, d = sizes.attention[-1]

    def ids(device: Device) -> Any:
        return device.upload(np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32))

    def embedding(device: Device) -> dict[str, Any]:
        return {"table": normal(device, (vocab, columns), t), "ids": ids(device), "dtype": t}

    def embedding_backward(device: Device) -> dict[str, Any]:
        return {"dy": normal(device, (tokens, columns), t), "ids": ids(device), "vocab_size": vocab}

    def append(device: Device) -> dict[str, Any]:
        cache, new = device.zeros((1, 2 * tokens, g, d), t), normal(device, (1, tokens, g, d), t)
        return {"cache": cache, "new": new, "cache_len": device.zeros((1,), np.int32)}

    def in_pages(device: Device) -> dict[str, Any]:
        count = -(-tokens // PAGE)
        pools = {name: device.zeros((count, PAGE, g, d), t) for name in ("keys", "values")}
        return {**pools, "pages": device.upload(np.arange(count, dtype=np.int32)[None])}

    def paged_append(device: Device) -> dict[str, Any]:
        new = {name: normal(device, (tokens, g, d), t) for name in "kv"}
        return {**in_pages(device), **new, "places": device.upload(np.arange(tokens, dtype=np.int32))}

    def paged_attention(device: Device) -> dict[str, Any]:
        last = device.upload(np.array([tokens - 1], np.int32))
        return {"q": normal(device, (1, 1, h, d), t), **in_pages(device), "places": last, "scale": d**-0.5}

    return [
        entry("paged_append", (tokens, g, d), t, paged_append),
        entry("paged_attention", (tokens, h, g, d), t, paged_attention),
        entry("embedding", (tokens, vocab, columns), t, embedding),
        entry("embedding_backward", (tokens, vocab, columns), t, embedding_backward),
        entry("kv_append", (tokens, g, d), t, append),
    ]


def _fused(sizes: Sizes, t: np.dtype) -> list[Entry]:
    """Return the entries of gelu(x + b) and of its sum over rows: a layer's activation and a bias's gradient."""
    shape = sizes.rows, sizes.columns
    program = ("load", 0), ("load", 1), ("add", 0, 1), ("gelu", 2)

    def build(device: Device) -> dict[str, Any]:
        arrays = normal(device, shape, t), normal(device, shape[1:], t)
        views = ((shape[1], 1), 0), ((0, 1), 0)
        return {"program": program, "arrays": arrays, "views": views, "scalars": (), "shape": shape, "dtype": t}

    def summed(device: Device) -> dict[str, Any]:
        return {**build(device), "reduce": "sum", "axes": (0,)}

    return [entry("fused", shape, t, build, "gelu"), entry("fused", shape, t, summed, "gelu, sum of rows")]


def _ropes(sizes: Sizes, t: np.dtype) -> list[Entry]:
    tokens, (_, _, h, g, d) = sizes.tokens, sizes.attention[-1]

    def angles(device: Device) -> dict[str, Any]:
        cos, sin = (normal(device, (tokens, d // 2), F32, seed) for seed in (1, 2))
        return {"cos": cos, "sin": sin, "positions": device.upload(np.arange(tokens, dtype=np.int32))}

    def rope(device: Device) -> dict[str, Any]:
        return {"x": normal(device, (tokens, h, d), t), **angles(device)}

    def append(device: Device) -> dict[str, Any]:
        k, v = (normal(device, (tokens, g, d), t, seed) for seed in (3, 4))
        keys, values = (device.zeros((1, 2 * tokens, g, d), t) for _ in range(2))
        more = {"keys": keys, "values": values, "cache_len": device.zeros((1,), np.int32)}
        return {"k": k, "v": v, **angles(device), **more}

    def split(device: Device) -> dict[str, Any]:
        return {"qkv": normal(device, (tokens, (h + 2 * g) * d), t), **angles(device), "heads": h, "kv_heads": g}

    def split_back(device: Device) -> dict[str, Any]:
        dk, dv = (normal(device, (tokens, g, d), t, seed) for seed in (3, 4))
        return {"dq": normal(device, (tokens, h, d), t), "dk": dk, "dv": dv, **angles(device)}

    return [
        entry("rope", (tokens, h, d), t, rope),
        entry("rope_append", (tokens, g, d), t, append),
        entry("rope_split", (tokens, h + 2 * g, d), t, split),
        entry("rope_split_backward", (tokens, h + 2 * g, d), t, split_back),
    ]


def _float32_only(sizes: Sizes) -> list[Entry]:
    """Return the entries of clipping, quantization, sampling and a cast."""
    shape, vocab = (sizes.rows, sizes.columns), sizes.loss[1]
    blocks = (sizes.rows // 2, 2 * sizes.columns)  # rows of whole blocks

    def clip(device: Device) -> dict[str, Any]:
        sizes_ = {"norm": 2, "hyper": HYPER_SIZE, "state": STATE_SIZE, "loss_scale": 1}
        return {**{n: device.zeros((s,)) for n, s in sizes_.items()}, "beta1": 0.9, "beta2": 0.95}

    def restore(device: Device) -> dict[str, Any]:
        return {"w": device.quantize(normal(device, shape), double=True)}

    def rounding(device: Device) -> dict[str, Any]:
        return {"w": normal(device, blocks), "out": Q4KArray.empty(blocks, device.empty)}

    def cast(device: Device) -> dict[str, Any]:
        return {"x": normal(device, shape), "dtype": np.dtype(np.float16 if device.float16 else np.float32)}

    def sample(device: Device) -> dict[str, Any]:
        uniform = device.upload(np.array([0.5], np.float32))
        settings = device.upload(sample_settings(temperature=0.8, top_p=0.95)[None])
        return {"logits": normal(device, (vocab,)), "uniform": uniform, "settings": settings}

    def advance(device: Device) -> dict[str, Any]:
        one, all_steps = ("drawn", "step", "ids", "positions", "cache_len"), (sizes.keys, 1)
        made = {name: device.zeros((1,), np.int32) for name in one}
        made |= {"tokens": device.zeros(all_steps, np.int32), "uniforms": device.zeros(all_steps)}
        return {**made, "uniform": device.zeros((1,))}

    return [
        entry("advance", (sizes.keys,), F32, advance),
        entry("clip", (STATE_SIZE,), F32, clip),
        entry("quantize", shape, F32, lambda device: {"w": normal(device, shape)}, "nf4"),
        entry("quantize_scales", shape, F32, lambda device: {"w": device.quantize(normal(device, shape))}, "nf4"),
        entry("dequantize", shape, F32, restore, "nf4 double"),
        entry("round_weight", blocks, F32, rounding, "q4_k"),
        entry("sample", (vocab,), F32, sample, "top_p"),
        entry("cast", shape, F32, cast, "to float16"),
    ]
