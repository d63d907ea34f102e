"""Self-test cases of mixture of experts: the router, grouping by expert, grouped GEMMs and combining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import formats


def cases(t: np.dtype) -> list[Case]:
    found = _router_cases(t) + _combine_cases(t) + _grouped_cases(t)
    return found + _group_cases() if t == F32 else found


# ---- the router ------------------------------------------------------------------------------------
def _router_cases(t: np.dtype) -> list[Case]:
    found = []
    for tokens, experts, chosen, normalize in ((5, 7, 2, True), (41, 130, 8, False), (3, 5, 5, True), (9, 1, 1, False)):

        def build(rng: np.random.Generator, sizes: tuple[int, int, int] = (tokens, experts, chosen)) -> Inputs:
            tokens, experts, chosen = sizes
            logits = normal(rng, (tokens, experts), t, 2.0)
            logits[0] = 1  # a tie of all
            made: Inputs = {"logits": logits, "dweights": normal(rng, (tokens, chosen))}
            made["ids"] = ReferenceDevice().route(logits, chosen, True)[1]
            made["by"] = normal(rng, (tokens, experts))
            made["by"][-1] = 0.5  # a tie of all, here too
            return made

        def forward(device: Device, x: Inputs, chosen: int = chosen, normalize: bool = normalize) -> Outputs:
            weights, ids = device.route(x["logits"], chosen, normalize)
            return {"weights": weights, "ids": ids}

        def forward_by(device: Device, x: Inputs, chosen: int = chosen, normalize: bool = normalize) -> Outputs:
            weights, ids = device.route(x["logits"], chosen, normalize, x["by"])
            return {"weights": weights, "ids": ids}

        def backward(device: Device, x: Inputs, normalize: bool = normalize) -> Outputs:
            return {"dlogits": device.route_backward(x["dweights"], x["logits"], x["ids"], normalize)}

        shape = f"{tokens}x{experts}x{chosen}"
        name = f"{'chosen' if normalize else 'all'}/{shape}/{dtype_name(t)}"
        of: Any = partial(Case, dtype=dtype_name(t), shape=shape, build=build, ulps=BUILTIN_ULPS)
        found.append(of(f"route/{name}", "route", "forward", call=forward))
        found.append(of(f"route/by others {name}", "route", "forward", call=forward_by))
        found.append(of(f"route_backward/{name}", "route_backward", "backward", call=backward))
    return found


# ---- rows by expert --------------------------------------------------------------------------------
def some_ids(rng: np.random.Generator, tokens: int, experts: int, chosen: int) -> np.ndarray:
    """Return different experts for each token: int32 [tokens, chosen]. The last but one gets no token if possible."""
    logits = rng.standard_normal((tokens, experts))
    if experts > chosen + 1:
        logits[:, -2] = -99
    return np.ascontiguousarray(np.argsort(-logits, axis=1)[:, :chosen].astype(np.int32))


def _group_cases() -> list[Case]:
    found = []
    for tokens, experts, chosen in ((5, 7, 2), (131, 5, 3), (300, 130, 8), (1, 3, 1)):

        def build(rng: np.random.Generator, sizes: tuple[int, int, int] = (tokens, experts, chosen)) -> Inputs:
            tokens, experts, chosen = sizes
            return {"ids": some_ids(rng, tokens, experts, chosen)}

        def call(device: Device, x: Inputs, experts: int = experts) -> Outputs:
            return dict(zip(("start", "order", "place"), device.group_by_expert(x["ids"], experts)))

        shape = f"{tokens}x{experts}x{chosen}"
        found.append(Case(f"group_by_expert/{shape}", "group_by_expert", "forward", "int32", shape, build, call))
    return found


def _groups(rng: np.random.Generator, tokens: int, experts: int, chosen: int) -> dict[str, np.ndarray]:
    ids = some_ids(rng, tokens, experts, chosen)
    return dict(zip(("start", "order", "place"), ReferenceDevice().group_by_expert(ids, experts)))


# ---- back to tokens --------------------------------------------------------------------------------
def _combine_cases(t: np.dtype) -> list[Case]:
    found = []
    for variant, tokens, chosen, columns in (("plain", 5, 2, 68), ("weighted", 37, 3, 67), ("residual", 9, 8, 132)):

        def build(rng: np.random.Generator, sizes: tuple[int, int, int] = (tokens, chosen, columns)) -> Inputs:
            tokens, chosen, columns = sizes
            made: Inputs = {**_groups(rng, tokens, 9, chosen), "y": normal(rng, (tokens * chosen, columns), t)}
            made["weights"] = normal(rng, (tokens, chosen))
            made["residual"], made["dsum"] = normal(rng, (tokens, columns)), normal(rng, (tokens, columns), t)
            return made

        def forward(device: Device, x: Inputs, variant: str = variant) -> Outputs:
            weights = None if variant == "plain" else x["weights"]
            options = {"residual": x["residual"], "dtype": F32} if variant == "residual" else {}
            return {"out": device.combine(x["y"], x["place"], weights, **options)}

        def backward(device: Device, x: Inputs) -> Outputs:
            dy, dweights = device.combine_backward(x["dsum"], x["y"], x["order"], x["weights"])
            return {"dy": dy, "dweights": dweights}

        shape = f"{tokens}x{chosen}x{columns}"
        of: Any = partial(Case, dtype=dtype_name(t), shape=shape, build=build)
        found.append(of(f"combine/{variant}/{shape}/{dtype_name(t)}", "combine", "forward", call=forward))
        back = f"combine_backward/{variant}/{shape}/{dtype_name(t)}"
        found.append(of(back, "combine_backward", "backward", call=backward))
    return found


# ---- GEMMs of experts ------------------------------------------------------------------------------
def grouped_case(
    direction: str,
    variant: str,
    sizes: tuple[int, int, int, int, int],
    t: Any,
    *,
    format: str = "",
    double: bool = False,
    gather: bool = False,
    add: bool = False,
    one_has_all: bool = False,
    dtype: Any = None,
    weight: Any = F32,
    dy: Any = None,
) -> Case:
    """Return a case of a grouped GEMM.

    Args:
        direction: "forward", "backward" or "weight_grad".
        variant: Name of the case.
        sizes: Tokens, experts, experts of a token, N, K.
        t: Dtype of x and dy.
        format: Format of the weight; "": a dense array.
        double: Whether scales are quantized.
        gather: Whether x has a row for each token, not for each pair of token and expert.
        add: Whether a term is added, or the gradient accumulated.
        one_has_all: Whether one expert has all rows.
        dtype: Dtype of the result; None: the default.
        weight: Dtype of a dense weight.
        dy: Dtype of dy; None: t.
    """
    tokens, experts, chosen, n, k = sizes
    if format:
        k = -(-k // formats()[format].block) * formats()[format].block

    def build(rng: np.random.Generator) -> Inputs:
        made: Inputs = dict(_groups(rng, tokens, experts, chosen))
        if one_has_all:
            made["start"] = np.where(np.arange(experts + 1) > experts // 2, tokens * chosen, 0).astype(np.int32)
        full = normal(rng, (experts * n, k), F32, 0.1)
        made["weight"] = (
            formats()[format].quantize(full, 64, double) if format else full.reshape(experts, n, k).astype(weight)
        )
        made["x"] = normal(rng, (tokens if gather else tokens * chosen, k), t)
        made["dy"] = normal(rng, (tokens * chosen, n), t if dy is None else dy)
        made["add"] = normal(rng, (tokens * chosen, n))
        made["out"] = normal(rng, (experts, n, k))
        return made

    op, function = _GROUPED[direction]
    call = partial(function, gather=gather, add=add, dtype=dtype)
    shape = "x".join(map(str, (tokens, experts, chosen, n, k)))
    kind = f"{format}{' double' if double else ''}" or dtype_name(weight)
    name = f"{op}/{kind} {variant}/{shape}/{dtype_name(t)}"
    side = "forward" if direction == "forward" else "backward"
    return Case(name, op, side, dtype_name(t), shape, build, call)


def _forward(device: Device, x: Inputs, gather: bool, add: bool, dtype: Any) -> Outputs:
    more = {"add": x["add"], "alpha": 1.5} if add else {}
    order = x["order"] if gather else None
    return {"y": device.grouped_linear(x["x"], x["weight"], x["start"], order=order, dtype=dtype, **more)}


def _backward(device: Device, x: Inputs, gather: bool, add: bool, dtype: Any) -> Outputs:
    return {"dx": device.grouped_linear_backward(x["dy"], x["weight"], x["start"], dtype=dtype)}


def _weight_grad(device: Device, x: Inputs, gather: bool, add: bool, dtype: Any) -> Outputs:
    more = {"out": x["out"], "accumulate": True} if add else {}
    order = x["order"] if gather else None
    return {"dw": device.grouped_weight_grad(x["dy"], x["x"], x["start"], order=order, alpha=0.5, **more)}


# The operator of each direction, and the call of its cases.
_GROUPED: dict[str, tuple[str, Callable[..., Outputs]]] = {
    "forward": ("grouped_linear", _forward),
    "backward": ("grouped_linear_backward", _backward),
    "weight_grad": ("grouped_weight_grad", _weight_grad),
}


def _grouped_cases(t: np.dtype) -> list[Case]:
    found = []
    for side in ("forward", "backward"):
        found += [
            grouped_case(side, "few rows", (3, 7, 2, 37, 35), t),
            grouped_case(side, "rows", (70, 5, 2, 72, 68), t, gather=side == "forward"),
            grouped_case(side, "many rows", (131, 3, 2, 70, 40), t, weight=F16),
            grouped_case(side, "flat tiles", (131, 3, 2, 140, 132), t),
            grouped_case(side, "one expert has all", (33, 4, 3, 20, 64), t, one_has_all=True),
            grouped_case(side, "narrow", (50, 3, 2, 5, 64), t, gather=side == "forward"),
            grouped_case(side, "odd", (9, 3, 2, 35, 67), t, format="nf4", double=True),
            grouped_case(side, "rows", (37, 5, 2, 40, 72), t, format="nf4"),
            grouped_case(side, "eights", (61, 5, 2, 72, 64), t, gather=side == "forward"),
            grouped_case(side, "eights", (61, 5, 2, 72, 64), t, format="nf4", double=True),
            grouped_case(side, "few eights", (21, 5, 2, 72, 128), t, gather=side == "forward", format="q8_0"),
        ]
        for format in ("mxfp4", "q8_0", "q6_k", "iq2_xxs"):
            found.append(grouped_case(side, "plain", (9, 3, 2, 24, 32), t, format=format))
    found += [
        grouped_case("forward", "add", (41, 5, 3, 36, 40), t, gather=True, add=True, dtype=F32),
        grouped_case("weight_grad", "narrow", (50, 3, 2, 5, 67), t, gather=True),
        grouped_case("weight_grad", "flat", (50, 3, 2, 67, 8), t, add=True),
        grouped_case("weight_grad", "tiles", (33, 4, 2, 36, 40), t, one_has_all=True),
    ]
    return found
