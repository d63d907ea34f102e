"""Self-test cases of norms, activations, rotary embedding, attention, softmax and the plain operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BF16, BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Array, Device


def cases(dtype: np.dtype) -> list[Case]:
    return (
        _norm_cases(dtype)
        + _activation_cases(dtype)
        + _rope_cases(dtype)
        + _attention_cases(dtype)
        + _softmax_cases(dtype)
        + _plain_cases(dtype)
    )


def _norm(
    variant: str,
    r: int,
    c: int,
    x_dtype: Any,
    y_dtype: Any,
    *,
    given: bool = True,
    residual: bool = False,
    dweight: bool = True,
    backward: bool = False,
) -> Case:
    """given: the dtype of the result is named in the call, dx's as well."""
    options = {"dtype": x_dtype if backward else y_dtype} if given else {}

    def build(rng: np.random.Generator) -> Inputs:
        x, weight = normal(rng, (r, c), x_dtype), 1 + normal(rng, (c,), scale=0.2)
        rstd = ReferenceDevice().rms_norm(x, weight, 1e-5)[1]
        inputs = {"x": x, "weight": weight, "rstd": rstd, "dy": normal(rng, (r, c), y_dtype)}
        return {**inputs, "residual_grad": normal(rng, (r, c), x_dtype)} if residual else inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        y, rstd = device.rms_norm(x["x"], x["weight"], 1e-5, **options)
        return {"y": y, "rstd": rstd}

    def back(device: Device, x: Inputs) -> Outputs:
        dx, dw = device.rms_norm_backward(
            x["dy"],
            x["x"],
            x["weight"],
            x["rstd"],
            residual_grad=x.get("residual_grad"),
            need_dweight=dweight,
            **options,
        )
        return {"dx": dx, **({"dweight": dw} if dweight else {})}

    op = "rms_norm_backward" if backward else "rms_norm"
    shape, dtypes = f"{r}x{c}", f"{dtype_name(x_dtype)}>{dtype_name(y_dtype)}"
    name, direction = f"{op}/{variant}/{shape}/{dtypes}", "backward" if backward else "forward"
    return Case(name, op, direction, dtypes, shape, build, back if backward else forward)


def _norm_cases(t: np.dtype) -> list[Case]:
    shapes = ((5, 64), (7, 123), (133, 40), (3, 1003), (33, 576), (1, 2052))
    found = [_norm("plain", r, c, t, t, backward=b) for r, c in shapes for b in (False, True)]
    found += [
        _norm("residual", 41, 123, t, t, residual=True, backward=True),
        _norm("no dweight", 41, 123, t, t, residual=True, dweight=False, backward=True),
    ]
    found += [_norm("default dtype", 41, 123, t, t, given=False, backward=b) for b in (False, True)]
    if t == F16:
        found += [_norm("mixed", 41, 123, F32, F16, residual=True, backward=b) for b in (False, True)]
        found.append(_norm("mixed, default dtype", 41, 123, F32, F16, given=False, residual=True, backward=True))
    return found


def _activation_cases(t: np.dtype) -> list[Case]:
    found = []
    name = dtype_name(t)
    for shape in ((7, 123), (1, 3), (33, 128)):
        text = "x".join(map(str, shape))

        def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
            return {n: normal(rng, shape, t, s) for n, s in (("x", 3.0), ("up", 1.0), ("dy", 1.0))}

        for op in ("silu", "gelu"):

            def forward(device: Device, x: Inputs, op: str = op) -> Outputs:
                return {"y": getattr(device, op)(x["x"])}

            def backward(device: Device, x: Inputs, op: str = op) -> Outputs:
                return {"dx": getattr(device, op + "_backward")(x["dy"], x["x"])}

            found += _pair(op, text, name, build, forward, backward)
        for op in ("swiglu", "geglu"):

            def gated(device: Device, x: Inputs, op: str = op) -> Outputs:
                return {"y": getattr(device, op)(x["x"], x["up"])}

            def gated_backward(device: Device, x: Inputs, op: str = op) -> Outputs:
                dgate, dup = getattr(device, op + "_backward")(x["dy"], x["x"], x["up"])
                return {"dgate": dgate, "dup": dup}

            found += _pair(op, text, name, build, gated, gated_backward)
    return found


def _pair(op: str, shape: str, dtype: str, build: Any, forward: Any, backward: Any) -> list[Case]:
    back = f"{op}_backward"
    return [
        Case(f"{op}/{shape}/{dtype}", op, "forward", dtype, shape, build, forward, BUILTIN_ULPS),
        Case(f"{back}/{shape}/{dtype}", back, "backward", dtype, shape, build, backward, BUILTIN_ULPS),
    ]


def _rope_cases(t: np.dtype) -> list[Case]:
    found = []
    for n, h, d in ((37, 3, 64), (41, 2, 40), (5, 4, 128), (1, 1, 6)):

        def build(rng: np.random.Generator, n: int = n, h: int = h, d: int = d) -> Inputs:
            angle = np.outer(np.arange(53), 10000.0 ** (-np.arange(d // 2) / (d // 2)))
            positions = rng.integers(0, 53, n).astype(np.int32)
            cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            return {"x": normal(rng, (n, h, d), t), "cos": cos, "sin": sin, "positions": positions}

        for inverse in (False, True):

            def call(device: Device, x: Inputs, inverse: bool = inverse) -> Outputs:
                return {"y": device.rope(x["x"], x["cos"], x["sin"], x["positions"], inverse=inverse)}

            shape, direction = f"{n}x{h}x{d}", "backward" if inverse else "forward"
            name = f"rope/{direction}/{shape}/{dtype_name(t)}"
            found.append(Case(name, "rope", direction, dtype_name(t), shape, build, call))
    return found + [
        _rope_append("prefill", (2, 5, 3, 10), t, keys=37, cache_len=29),
        _rope_append("full", (3, 7, 2, 64), t, keys=11, cache_len=4),
        _rope_append("decode", (1, 1, 2, 128), t, keys=53, cache_len=41),
        _rope_append("past the end", (2, 7, 1, 40), t, keys=19, cache_len=15),
    ]


def _rope_append(variant: str, new: tuple[int, int, int, int], t: Any, *, keys: int, cache_len: int) -> Case:
    """new: B, T, G, D; `keys` is S."""
    b, length, g, d = new

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {name: normal(rng, (b * length, g, d), t) for name in ("k", "v")}
        inputs |= {name: normal(rng, (61, d // 2)) for name in ("cos", "sin")}
        inputs["positions"] = rng.integers(0, 61, b * length).astype(np.int32)
        inputs |= {name: normal(rng, (b, keys, g, d), t) for name in ("keys", "values")}
        return {**inputs, "cache_len": np.array([cache_len], np.int32)}

    def call(device: Device, x: Inputs) -> Outputs:
        device.rope_append(*x.values())
        return {"keys": x["keys"], "values": x["values"]}

    shape = f"{b}x{length}x{g}x{d}"
    name = f"rope_append/{variant}/{shape}/{dtype_name(t)}"
    return Case(name, "rope_append", "forward", dtype_name(t), shape, build, call)


def _document_starts(rng: np.random.Generator, batch: int, length: int, documents: int) -> np.ndarray:
    doc_start = np.zeros((batch, length), np.int32)
    for row in doc_start:
        for first in np.sort(rng.integers(1, max(2, length), documents - 1)):
            row[first:] = first
    return doc_start


def _attention(
    variant: str,
    shape: tuple[int, int, int, int, int],
    t: Any,
    *,
    keys: int = 0,
    cache_len: int = 0,
    window: int = 0,
    documents: int = 1,
    backward: bool = False,
) -> Case:
    """shape: B, T, H, G, D; `keys` is S where it is not T."""
    b, length, h, g, d = shape
    s, scale = keys or length, d**-0.5

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {
            "q": normal(rng, (b, length, h, d), t),
            "k": normal(rng, (b, s, g, d), t),
            "v": normal(rng, (b, s, g, d), t),
            "doc_start": _document_starts(rng, b, length, documents),
            "cache_len": np.array([cache_len], np.int32),
        }
        if backward:
            o, lse = ReferenceDevice().attention(*inputs.values(), scale=scale, window=window)
            inputs |= {"o": o, "lse": lse, "do": normal(rng, o.shape, t)}
        return inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        o, lse = device.attention(x["q"], x["k"], x["v"], x["doc_start"], x["cache_len"], scale=scale, window=window)
        return {"o": o, "lse": lse}

    def back(device: Device, x: Inputs) -> Outputs:
        arguments = (x[n] for n in ("do", "q", "k", "v", "o", "lse", "doc_start"))
        return dict(zip(("dq", "dk", "dv"), device.attention_backward(*arguments, scale=scale, window=window)))

    op = "attention_backward" if backward else "attention"
    text, direction = f"{'x'.join(map(str, shape))}" + (f",{s}" if keys else ""), "backward" if backward else "forward"
    name = f"{op}/{variant}/{text}/{dtype_name(t)}"
    return Case(name, op, direction, dtype_name(t), text, build, back if backward else forward, BUILTIN_ULPS)


def _attention_cases(t: np.dtype) -> list[Case]:
    found = []
    for back in (False, True):
        found += [
            _attention("causal", (1, 37, 2, 2, 64), t, backward=back),
            _attention("one token", (1, 1, 2, 1, 64), t, backward=back),
            _attention("grouped", (2, 70, 6, 2, 64), t, backward=back),
            _attention("one group", (1, 33, 3, 1, 128), t, backward=back),
            _attention("tiles", (1, 259, 2, 1, 64), t, backward=back),
            _attention("odd width", (1, 41, 4, 2, 40), t, backward=back),
            _attention("width 96", (1, 67, 2, 1, 96), t, backward=back),
            _attention("width 10", (1, 41, 2, 1, 10), t, backward=back),
            _attention("window", (2, 70, 4, 2, 64), t, window=13, backward=back),
            _attention("window 1", (1, 37, 2, 2, 40), t, window=1, backward=back),
            _attention("packed", (2, 133, 4, 2, 64), t, documents=5, backward=back),
            _attention("packed window", (2, 133, 4, 2, 40), t, documents=3, window=29, backward=back),
        ]
    return found + [
        _attention("decode", (2, 1, 4, 2, 64), t, keys=53, cache_len=41),
        _attention("decode long", (1, 1, 6, 2, 64), t, keys=1003, cache_len=1002),
        _attention("decode first", (1, 1, 4, 2, 40), t, keys=64, cache_len=0),
        _attention("decode window", (1, 1, 4, 1, 128), t, keys=130, cache_len=100, window=17),
        _attention("prefill on a cache", (1, 19, 4, 2, 64), t, keys=130, cache_len=70),
        _kv_append("", 29, t),
        _kv_append("/past the end", 34, t),
    ]


def _kv_append(variant: str, cache_len: int, t: np.dtype) -> Case:
    def build(rng: np.random.Generator) -> Inputs:
        cache, new = normal(rng, (2, 37, 3, 10), t), normal(rng, (2, 5, 3, 10), t)
        return {"cache": cache, "new": new, "cache_len": np.array([cache_len], np.int32)}

    def call(device: Device, x: Inputs) -> Outputs:
        device.kv_append(x["cache"], x["new"], x["cache_len"])
        return {"cache": x["cache"]}

    name = f"kv_append{variant}/{dtype_name(t)}"
    return Case(name, "kv_append", "forward", dtype_name(t), "2x37x3x10", build, call)


def _softmax_cases(t: np.dtype) -> list[Case]:
    found = []
    for shape in ((5, 123), (41, 7), (3, 1003), (9, 64)):

        def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
            x = normal(rng, shape, t, 3.0)
            return {"x": x, "y": ReferenceDevice().softmax(x), "dy": normal(rng, shape, t)}

        def forward(device: Device, x: Inputs) -> Outputs:
            return {"y": device.softmax(x["x"])}

        def backward(device: Device, x: Inputs) -> Outputs:
            return {"dx": device.softmax_backward(x["dy"], x["y"])}

        found += _pair("softmax", "x".join(map(str, shape)), dtype_name(t), build, forward, backward)
    return found


Call = Callable[[Device, Inputs], Array]


def _plain_cases(t: np.dtype) -> list[Case]:
    """Operators of one line: the same inputs for all of them."""
    name = dtype_name(t)
    calls: dict[str, Call] = {
        "mask": lambda device, x: device.mask(x["x"], x["keep"], -7.5),
        "add": lambda device, x: device.add(x["x"], x["y"]),
        "add in place": lambda device, x: device.add(x["x"], x["y"], out=x["x"]),
        "add into the second": lambda device, x: device.add(x["x"], x["y"], out=x["y"]),
        "mul": lambda device, x: device.mul(x["x"], x["y"]),
        "scale": lambda device, x: device.scale(x["x"], -0.37),
        "scale_by": lambda device, x: device.scale_by(x["x"], x["factor"]),
        "cast to float32": lambda device, x: device.cast(x["x"], F32),
        "cast from bfloat16": lambda device, x: device.cast(x["bf16"], t),
        "bias": lambda device, x: device.bias(x["x"], x["b"]),
        "sum_rows": lambda device, x: device.sum_rows(x["x"]),
        "sum_rows accumulate": lambda device, x: device.sum_rows(x["x"], out=x["b"], accumulate=True),
        "sum": lambda device, x: device.sum(x["x"]),
        "dropout": lambda device, x: device.dropout(x["x"], 0.3, x["seed"], 7),
        "dropout 0.05": lambda device, x: device.dropout(x["x"], 0.05, x["seed"], 123456789),
    }
    if t == F16:
        calls["cast to float16"] = lambda device, x: device.cast(x["f32"], F16)
        calls["add float32"] = lambda device, x: device.add(x["x"], x["f32"])
        calls["add to float32"] = lambda device, x: device.add(x["f32"], x["x"], out=x["f32"])
    found = []
    for variant, call in calls.items():
        for shape in ((7, 123), (129, 64), (1, 1)):

            def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
                return {
                    "x": normal(rng, shape, t),
                    "y": normal(rng, shape, t),
                    "f32": normal(rng, shape, F32),
                    "bf16": normal(rng, shape, BF16),
                    "b": normal(rng, shape[1:], F32),
                    "keep": (rng.random(shape) < 0.6).astype(np.uint32),
                    "factor": np.array([1.7], np.float32),
                    "seed": rng.integers(0, 2**32, 2).astype(np.uint32),
                }

            def run(device: Device, x: Inputs, call: Call = call) -> Outputs:
                return {"y": call(device, x)}

            text = "x".join(map(str, shape))
            found.append(Case(f"{variant}/{text}/{name}", variant.split()[0], "forward", name, text, build, run))
    return found
