"""Self-test cases of the cross-entropy of a linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def _loss(
    variant: str,
    n: int,
    v: int,
    c: int,
    x_dtype: Any,
    w_dtype: Any,
    *,
    dx: bool = True,
    dw: bool = False,
    drop: float = 0.2,
    softcap: float = 0.0,
    per_target: bool = False,
    bias: bool = False,
) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        targets = rng.integers(0, v, n).astype(np.int32)
        targets[rng.random(n) < drop] = -100
        found = {"x": normal(rng, (n, c), x_dtype), "weight": normal(rng, (v, c), w_dtype, 0.3), "targets": targets}
        return found | ({"bias": normal(rng, (v,), F32)} if bias else {})

    def call(device: Device, x: Inputs) -> Outputs:
        options: dict[str, Any] = {"need_dx": dx, "need_dweight": dw, "need_dbias": bias and dw}
        options |= {"bias": x.get("bias"), "softcap": softcap, "per_target": per_target}
        made = device.linear_cross_entropy(x["x"], x["weight"], x["targets"], **options)
        return {name: array for name, array in zip(("loss", "dx", "dweight", "dbias"), made) if array is not None}

    op, shape = "linear_cross_entropy", f"{n}x{v}x{c}"
    dtypes = dtype_name(x_dtype) + ("" if x_dtype == w_dtype else f"*{dtype_name(w_dtype)}")
    direction = "backward" if dx or dw else "forward"
    return Case(f"{op}/{variant}/{shape}/{dtypes}", op, direction, dtypes, shape, build, call, ulps=BUILTIN_ULPS)


def cases(t: np.dtype) -> list[Case]:
    found = [
        _loss("loss only", 37, 123, 41, t, t, dx=False),
        _loss("dx", 37, 123, 41, t, t),
        _loss("dx dweight", 37, 123, 41, t, t, dw=True),
        _loss("dweight only", 37, 130, 64, t, t, dx=False, dw=True),
        _loss("bfloat16 weight", 70, 1003, 64, t, BF16),
        _loss("large vocabulary", 133, 5003, 72, t, t, dw=True),
        _loss("one token", 1, 123, 40, t, t, dw=True, drop=0.0),
        _loss("softcap", 37, 123, 41, t, t, dw=True, softcap=2.5),
        _loss("softcap large vocabulary", 70, 5004, 72, t, t, dw=True, softcap=2.5),
        _loss("softcap loss only", 37, 123, 41, t, t, dx=False, softcap=2.5),
        _loss("bias", 133, 123, 41, t, t, dw=True, softcap=2.5, bias=True),
        _loss("bias loss only", 70, 1004, 40, t, t, dx=False, bias=True),
        _loss("per target", 133, 123, 41, t, t, per_target=True),
        _loss("all ignored", 9, 123, 40, t, t, dw=True, drop=2.0),
    ]
    if t == F16:
        found += [_loss("mixed", 37, 123, 41, F16, F32, dw=True), _loss("mixed", 37, 123, 41, F32, F16)]
        # Sizes that tensor cores take, which round gradients of logits to float16.
        found += [
            _loss("rows of eights", 70, 1000, 64, F16, BF16, dw=True),
            _loss("bias rows of eights", 70, 1000, 64, F16, F16, dw=True, bias=True),
            _loss("softcap rows of eights", 133, 1000, 72, F16, F16, dw=True, softcap=2.5),
        ]
    return found
