"""Self-test cases of embedding, loss, optimiser, decoding and storage."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import HYPER_SIZE, STATE_BIAS1, STATE_BIAS2, STATE_SIZE, Array, Device

BETAS = {"beta1": 0.9, "beta2": 0.999}


def cases(dtype: np.dtype) -> list[Case]:
    found = _embedding_cases(dtype) + _loss_cases(dtype) + _storage_cases(dtype)
    if dtype == F32:
        found += _optimizer_cases() + _sample_cases()
    return found


def _embedding_cases(t: np.dtype) -> list[Case]:
    vocab, width, count = 71, 37, 123
    shape, name = f"{vocab}x{width},{count}", dtype_name(t)

    def build(table_dtype: Any) -> Any:
        def build_inputs(rng: np.random.Generator) -> Inputs:
            ids = rng.integers(0, vocab, count).astype(np.int32)
            ids[:2] = (0, vocab - 1)
            return {
                "table": normal(rng, (vocab, width), table_dtype),
                "ids": ids,
                "dy": normal(rng, (count, width), t),
            }

        return build_inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        return {"y": device.embedding(x["table"], x["ids"], dtype=t)}

    def default(device: Device, x: Inputs) -> Outputs:
        return {"y": device.embedding(x["table"], x["ids"])}

    def backward(device: Device, x: Inputs) -> Outputs:
        return {"dtable": device.embedding_backward(x["dy"], x["ids"], vocab)}

    found = [
        Case(f"embedding/{dtype_name(d)} table/{shape}/{name}", "embedding", "forward", name, shape, build(d), forward)
        for d in (F32, F16, BF16)
        if t == F16 or d != F16
    ]
    for d in (F32, BF16) if t == F32 else (F16,):
        label = f"embedding/default dtype, {dtype_name(d)} table/{shape}/{name}"
        found.append(Case(label, "embedding", "forward", name, shape, build(d), default))
    more = Case(
        f"embedding_backward/{shape}/{name}", "embedding_backward", "backward", name, shape, build(F32), backward
    )
    return [*found, more]


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
) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        targets = rng.integers(0, v, n).astype(np.int32)
        targets[rng.random(n) < drop] = -100
        return {"x": normal(rng, (n, c), x_dtype), "weight": normal(rng, (v, c), w_dtype, 0.3), "targets": targets}

    def call(device: Device, x: Inputs) -> Outputs:
        loss, grad_x, grad_w = device.linear_cross_entropy(
            x["x"], x["weight"], x["targets"], need_dx=dx, need_dweight=dw
        )
        found = {"loss": loss, "dx": grad_x, "dweight": grad_w}
        return {name: array for name, array in found.items() if array is not None}

    op, shape = "linear_cross_entropy", f"{n}x{v}x{c}"
    dtypes = dtype_name(x_dtype) + ("" if x_dtype == w_dtype else f"*{dtype_name(w_dtype)}")
    direction = "backward" if dx or dw else "forward"
    return Case(f"{op}/{variant}/{shape}/{dtypes}", op, direction, dtypes, shape, build, call, ulps=BUILTIN_ULPS)


def _loss_cases(t: np.dtype) -> list[Case]:
    found = [
        _loss("loss only", 37, 123, 41, t, t, dx=False),
        _loss("dx", 37, 123, 41, t, t),
        _loss("dx dweight", 37, 123, 41, t, t, dw=True),
        _loss("dweight only", 37, 130, 64, t, t, dx=False, dw=True),
        _loss("bfloat16 weight", 70, 1003, 64, t, BF16),
        _loss("large vocabulary", 133, 5003, 72, t, t, dw=True),
        _loss("one token", 1, 123, 40, t, t, dw=True, drop=0.0),
        _loss("all ignored", 9, 123, 40, t, t, dw=True, drop=2.0),
    ]
    if t == F16:
        found += [_loss("mixed", 37, 123, 41, F16, F32, dw=True), _loss("mixed", 37, 123, 41, F32, F16)]
    return found


def _hyper(lr: float, max_norm: float, interval: float) -> np.ndarray:
    hyper = np.zeros(HYPER_SIZE, np.float32)
    hyper[:3] = lr, max_norm, interval
    return hyper


def _state(applied: int, good: int) -> np.ndarray:
    state = np.zeros(STATE_SIZE, np.float32)
    state[:2] = applied, good
    state[STATE_BIAS1], state[STATE_BIAS2] = 1 - BETAS["beta1"] ** applied, 1 - BETAS["beta2"] ** applied
    return state


def _clip(variant: str, norm: tuple[float, float], hyper: np.ndarray, state: np.ndarray, loss_scale: float) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        scale = np.array([loss_scale], np.float32)
        return {"norm": np.array(norm, np.float32), "hyper": hyper, "state": state.copy(), "loss_scale": scale}

    def call(device: Device, x: Inputs) -> Outputs:
        device.clip(x["norm"], x["hyper"], x["state"], x["loss_scale"], **BETAS)
        return {"loss_scale": x["loss_scale"], "state": x["state"]}

    return Case(f"clip/{variant}", "clip", "forward", "float32", "8", build, call, finish="elements")


def _adamw(variant: str, n: int, apply: float, decay: int) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        state = _state(3, 3)
        state[2:4] = apply, 0.37
        return {
            "p": normal(rng, (n,)),
            "g": normal(rng, (n,)),
            "exp_avg": normal(rng, (n,), scale=0.1),
            "exp_avg_sq": np.abs(normal(rng, (n,), scale=0.1)),
            "hyper": _hyper(0.01, 1.0, 0.0),
            "state": state,
        }

    def call(device: Device, x: Inputs) -> Outputs:
        names = ("p", "g", "exp_avg", "exp_avg_sq", "hyper", "state")
        before = device.empty((n,), x["p"].dtype)
        device.copy(x["p"], before)
        device.adamw(*(x[n] for n in names), **BETAS, eps=1e-8, weight_decay=0.1, decay_elements=decay)
        outputs: dict[str, Array] = {name: x[name] for name in ("p", "exp_avg", "exp_avg_sq")}
        return {**outputs, "before": before}

    return Case(f"adamw/{variant}/{n}", "adamw", "forward", "float32", str(n), build, call, finish="step")


def _grad_norm(variant: str, n: int, bad: tuple[float, ...]) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        g = normal(rng, (n,))
        g[3 : 3 + len(bad)] = bad
        return {"g": g}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"norm": device.grad_norm(x["g"])}

    return Case(f"grad_norm/{variant}/{n}", "grad_norm", "forward", "float32", str(n), build, call, finish="elements")


def _optimizer_cases() -> list[Case]:
    return [
        _grad_norm("finite", 1003, ()),
        _grad_norm("finite", 70001, ()),
        _grad_norm("not finite", 1003, (np.inf, np.nan, -np.inf)),
        _clip("no clipping", (5.0, 0.0), _hyper(0.01, 0.0, 0.0), _state(0, 0), 1.0),
        _clip("clipped", (123.0, 0.0), _hyper(0.01, 1.0, 0.0), _state(6, 6), 1.0),
        _clip("below max_norm", (0.3, 0.0), _hyper(0.01, 1.0, 0.0), _state(1, 1), 1.0),
        _clip("loss scale", (4.1e8, 0.0), _hyper(0.01, 1.0, 100.0), _state(6, 6), 1024.0),
        _clip("scale grows", (4.1e8, 0.0), _hyper(0.01, 1.0, 7.0), _state(41, 6), 1024.0),
        _clip("scale at its top", (4.1e8, 0.0), _hyper(0.01, 1.0, 7.0), _state(41, 6), 65536.0),
        _clip("skipped", (4.1e8, 2.0), _hyper(0.01, 1.0, 7.0), _state(6, 5), 1024.0),
        _clip("skipped, fixed scale", (4.1, 1.0), _hyper(0.01, 1.0, 0.0), _state(6, 5), 8.0),
        _clip("skipped at scale 1", (4.1, 1.0), _hyper(0.01, 1.0, 7.0), _state(6, 5), 1.0),
        _adamw("applied", 1003, 1.0, 700),
        _adamw("all decayed", 130, 1.0, 130),
        _adamw("none decayed", 130, 1.0, 0),
        _adamw("skipped", 1003, 0.0, 700),
    ]


def _sample(variant: str, v: int, uniform: float, **options: Any) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        logits = normal(rng, (v,), scale=2.0)
        if "tie" in variant:
            logits[[v // 3, v // 2, v - 1]] = logits.max() + np.float32(1)
        return {"logits": logits, "uniform": np.array([uniform], np.float32)}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"id": device.sample(x["logits"], x["uniform"], **options)}

    return Case(f"sample/{variant}/{v}/{uniform}", "sample", "forward", "float32", str(v), build, call)


def _sample_cases() -> list[Case]:
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found = []
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
            ]
    return found


def _storage_cases(t: np.dtype) -> list[Case]:
    def build(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, (5, 64), t), "y": normal(rng, (3, 64), t)}

    def view(device: Device, x: Inputs) -> Outputs:
        tail = device.view(x["x"], (3, 64), 128)
        device.copy(x["y"], tail)
        return {"whole": x["x"], "sum": device.add(tail, tail), "reshaped": device.view(x["x"], (64, 5))}

    def fill(device: Device, x: Inputs) -> Outputs:
        device.fill(device.view(x["x"], (64,), 64), 0.375)
        odd = device.zeros((3, 7), t)
        device.fill(odd, -2.5)
        return {"x": x["x"], "odd": odd, "zeros": device.zeros((3, 41), t)}

    def replay(device: Device, x: Inputs) -> Outputs:
        total = device.zeros((3, 64), t)
        with device.capture() as recorded:
            twice = device.scale(x["y"], 2.0)
            device.add(total, device.mul(twice, x["y"]), out=total)
        device.write(x["y"], np.linspace(-2, 3, 192).astype(np.float32).astype(x["y"].dtype).reshape(3, 64))
        recorded.run()
        recorded.run()
        return {"twice": twice, "total": total}

    name = dtype_name(t)
    calls = (("view and copy", view), ("fill and zeros", fill), ("capture", replay))
    return [Case(f"storage/{variant}/{name}", "storage", "forward", name, "5x64", build, f) for variant, f in calls]
