"""Self-test cases of the KV cache and sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.ops.decoding import sample_settings
from wgrad.autograd.selftest.case import F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def cases(dtype: np.dtype) -> list[Case]:
    found = [_kv_append("", 29, dtype), _kv_append("/past the end", 34, dtype)]
    return found + _sample_cases() + [_advance(2), _advance(4)] if dtype == F32 else found


def _kv_append(variant: str, cache_len: int, t: np.dtype) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        cache, new = normal(rng, (2, 37, 3, 10), t), normal(rng, (2, 5, 3, 10), t)
        return {"cache": cache, "new": new, "cache_len": np.array([cache_len], np.int32)}

    def call(device: Device, x: Inputs) -> Outputs:
        device.kv_append(x["cache"], x["new"], x["cache_len"])
        return {"cache": x["cache"]}

    name = f"kv_append{variant}/{dtype_name(t)}"
    return Case(name, "kv_append", "forward", dtype_name(t), "2x37x3x10", build, call)


def _sample(variant: str, v: int, uniform: float, **options: Any) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        logits = normal(rng, (v,), scale=2.0)
        if "tie" in variant:
            logits[[v // 3, v // 2, v - 1]] = logits.max() + np.float32(1)
        settings = sample_settings(**options)[None]
        return {"logits": logits, "uniform": np.array([uniform], np.float32), "settings": settings}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"id": device.sample(**x)}

    return Case(f"sample/{variant}/{v}/{uniform}", "sample", "forward", "float32", str(v), build, call)


def _sample_rows() -> Case:
    """Return a case whose rows have different settings and draws, and one row of logits is not finite."""

    def build(rng: np.random.Generator) -> Inputs:
        logits = normal(rng, (6, 1003), scale=2.0)
        logits[2, 700] = np.nan
        uniform = np.array([0.1, 0.9, 0.5, 0.37, 0.62, 0.95], np.float32)
        rows = [(0.8, 50, 0.9, 0.0), (0.0, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.0), (1.3, 0, 1.0, 0.1), (1.0, 3, 1.0, 0.0)]
        settings = np.stack([sample_settings(*row) for row in [*rows, (0.6, 0, 0.5, 0.02)]])
        return {"logits": logits, "uniform": uniform, "settings": settings}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"id": device.sample(**x)}

    return Case("sample/rows/6x1003", "sample", "forward", "float32", "6x1003", build, call)


def _advance(step: int) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        ids = {name: rng.integers(0, 99, 3).astype(np.int32) for name in ("ids", "positions")}
        counters = {"step": np.array([step], np.int32), "cache_len": np.array([17], np.int32)}
        uniforms = rng.random((5, 3)).astype(np.float32)
        tokens = np.full((5, 3), -2, np.int32)
        drawn = np.array([7, -1, 0], np.int32)
        return {
            "drawn": drawn,
            "uniforms": uniforms,
            "tokens": tokens,
            **counters,
            **ids,
            "uniform": uniforms[0].copy(),
        }

    def call(device: Device, x: Inputs) -> Outputs:
        device.advance(**x)
        return {name: x[name] for name in ("tokens", "ids", "positions", "cache_len", "step", "uniform")}

    return Case(f"advance/{step}", "advance", "forward", "float32", "5x3", build, call)


def _sample_cases() -> list[Case]:
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found = [_sample_rows()]
    for v in (123, 5003):
        found += [
            _sample("greedy", v, 0.5, **{**off, "temperature": 0.0}),
            _sample("greedy tie", v, 0.5, **{**off, "temperature": 0.0}),
        ]
        for uniform in (0.0, 0.37, 0.81, 0.9999):
            found += [
                _sample("temperature", v, uniform, **{**off, "temperature": 0.7}),
                _sample("top_k", v, uniform, **{**off, "top_k": 7}),
                _sample("top_k tie", v, uniform, **{**off, "top_k": 2}),
                _sample("top_p", v, uniform, **{**off, "top_p": 0.73}),
                _sample("all", v, uniform, temperature=1.3, top_k=20, top_p=0.9),
                _sample("top_p tiny", v, uniform, **{**off, "top_p": 1e-6}),
                _sample("min_p", v, uniform, **off, min_p=0.07),
            ]
    return found
