"""Bench entries of what memory bounds: every other operator of the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry, normal, with_result
from wgrad.autograd.ops.optimizer import HYPER_SIZE, STATE_SIZE
from wgrad.device.contract import Device

UNARY = ("silu", "gelu", "sum", "sum_rows")
BINARY = ("swiglu", "geglu", "add", "mul")
ONE_BACK = ("silu_backward", "gelu_backward", "softmax_backward")
TWO_BACK = ("swiglu_backward", "geglu_backward")
_NAMES = {"add": "ab", "mul": "ab", "swiglu": ("gate", "up"), "geglu": ("gate", "up")}


def entries(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    found = [*_elementwise(sizes, dtype), *_norms(sizes, dtype), *_rows(sizes, dtype), *_ropes(sizes, dtype)]
    return found + _float32_only(sizes) if dtype == F32 else found


def _arrays(shape: tuple[int, ...], t: Any, names: Any, **more: Any) -> Callable[[Device], dict[str, Any]]:
    return lambda device: {**{n: normal(device, shape, t, i) for i, n in enumerate(names)}, **more}


def _elementwise(sizes: Sizes, t: np.dtype) -> list[Entry]:
    shape = (sizes.rows, sizes.columns)
    make = partial(entry, shape=shape, dtype=t)
    found = [make(op, build=_arrays(shape, t, ["x"])) for op in UNARY]
    found += [make(op, build=_arrays(shape, t, _NAMES[op])) for op in BINARY]
    found += [make(op, build=_arrays(shape, t, ["dy", "y" if "softmax" in op else "x"])) for op in ONE_BACK]
    found += [make(op, build=_arrays(shape, t, ["dy", "gate", "up"])) for op in TWO_BACK]
    found += [
        make("scale", build=_arrays(shape, t, ["x"], alpha=0.5)),
        make("softcap", build=_arrays(shape, t, ["x"], cap=30.0)),
        make("softmax", build=_arrays(shape, t, ["x"])),
    ]

    def beside(device: Device, op: str) -> dict[str, Any]:
        x = normal(device, shape, t)
        more: dict[str, dict[str, Any]] = {
            "scale_by": {"factor": normal(device, (1,))},
            "bias": {"b": normal(device, shape[1:])},
            "mask": {"keep": device.upload(np.ones(shape, np.uint32)), "value": -1.0},
            "dropout": {"p": 0.1, "seed": device.upload(np.array([1, 2], np.uint32)), "stream": 3},
        }
        return {"x": x, **more[op]}

    ops = ["scale_by", "bias", "mask", "dropout"]
    return found + [make(op, build=partial(beside, op=op)) for op in ops]


def _norms(sizes: Sizes, t: np.dtype) -> list[Entry]:
    found = []
    for shape in ((sizes.rows, sizes.columns), (sizes.rows * sizes.columns // 64, 64)):

        def rms(device: Device, shape: tuple[int, int] = shape) -> dict[str, Any]:
            return {"x": normal(device, shape, t), "weight": normal(device, shape[1:]), "eps": 1e-5}

        def layer(device: Device, rms: Any = rms, shape: tuple[int, int] = shape) -> dict[str, Any]:
            return {**rms(device), "bias": normal(device, shape[1:])}

        def rms_back(device: Device, given: dict[str, Any]) -> dict[str, Any]:
            _, rstd = device.rms_norm(**given)
            x = given["x"]
            return {"dy": normal(device, x.shape, t, 1), "x": x, "weight": given["weight"], "rstd": rstd}

        def layer_back(device: Device, given: dict[str, Any]) -> dict[str, Any]:
            _, mean, rstd = device.layer_norm(**given)
            dy = normal(device, given["x"].shape, t, 1)
            return {"dy": dy, "x": given["x"], "weight": given["weight"], "mean": mean, "rstd": rstd}

        found += [
            entry("rms_norm", shape, t, rms),
            with_result(entry("rms_norm_backward", shape, t, rms), rms_back),
            entry("layer_norm", shape, t, layer),
            with_result(entry("layer_norm_backward", shape, t, layer), layer_back),
        ]
    return found


def _rows(sizes: Sizes, t: np.dtype) -> list[Entry]:
    """Embedding, and the cache of keys and values."""
    tokens, columns, vocab = sizes.tokens, sizes.columns, sizes.loss[1]
    _, _, _, g, d = sizes.attention[-1]

    def ids(device: Device) -> Any:
        return device.upload(np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32))

    def embedding(device: Device) -> dict[str, Any]:
        return {"table": normal(device, (vocab, columns), t), "ids": ids(device), "dtype": t}

    def embedding_backward(device: Device) -> dict[str, Any]:
        return {"dy": normal(device, (tokens, columns), t), "ids": ids(device), "vocab_size": vocab}

    def append(device: Device) -> dict[str, Any]:
        cache, new = device.zeros((1, 2 * tokens, g, d), t), normal(device, (1, tokens, g, d), t)
        return {"cache": cache, "new": new, "cache_len": device.zeros((1,), np.int32)}

    return [
        entry("embedding", (tokens, vocab, columns), t, embedding),
        entry("embedding_backward", (tokens, vocab, columns), t, embedding_backward),
        entry("kv_append", (tokens, g, d), t, append),
    ]


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
    """What has no other type: the optimiser, quantisation, sampling, a cast."""
    shape, count, vocab = (sizes.rows, sizes.columns), sizes.rows * sizes.columns, sizes.loss[1]

    def adamw(device: Device) -> dict[str, Any]:
        state = np.zeros(STATE_SIZE, np.float32)
        state[:] = 1
        hyper = np.zeros(HYPER_SIZE, np.float32)
        hyper[0] = 1e-9
        made = {"hyper": device.upload(hyper), "state": device.upload(state), "exp_avg_sq": device.zeros((count,))}
        rates = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "decay_elements": count // 2}
        return {**_arrays((count,), F32, ["p", "g", "exp_avg"])(device), **made, **rates}

    def clip(device: Device) -> dict[str, Any]:
        sizes_ = {"norm": 2, "hyper": HYPER_SIZE, "state": STATE_SIZE, "loss_scale": 1}
        return {**{n: device.zeros((s,)) for n, s in sizes_.items()}, "beta1": 0.9, "beta2": 0.95}

    def restore(device: Device) -> dict[str, Any]:
        return {"w": device.quantize(normal(device, shape), double=True)}

    def cast(device: Device) -> dict[str, Any]:
        return {"x": normal(device, shape), "dtype": np.dtype(np.float16 if device.float16 else np.float32)}

    def sample(device: Device) -> dict[str, Any]:
        uniform = device.upload(np.array([0.5], np.float32))
        return {"logits": normal(device, (vocab,)), "uniform": uniform, "temperature": 0.8, "top_p": 0.95}

    def advance(device: Device) -> dict[str, Any]:
        one, all_steps = ("drawn", "step", "ids", "positions", "cache_len"), (sizes.keys, 1)
        made = {name: device.zeros((1,), np.int32) for name in one}
        made |= {"tokens": device.zeros(all_steps, np.int32), "uniforms": device.zeros(all_steps)}
        return {**made, "uniform": device.zeros((1,))}

    return [
        entry("advance", (sizes.keys,), F32, advance),
        entry("adamw", (count,), F32, adamw),
        entry("grad_norm", (count,), F32, _arrays((count,), F32, ["g"])),
        entry("clip", (STATE_SIZE,), F32, clip),
        entry("quantize", shape, F32, _arrays(shape, F32, ["w"]), "nf4"),
        entry("dequantize", shape, F32, restore, "nf4 double"),
        entry("sample", (vocab,), F32, sample, "top_p"),
        entry("cast", shape, F32, cast, "to float16"),
    ]
