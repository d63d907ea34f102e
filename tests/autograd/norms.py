"""Calls of every norm with a weight, by the names that its specification has: inputs, and what its forward leaves for
its backward. A test of norms then holds for the next one too."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.operators import OPERATORS
from wgrad.autograd.ops import norm

_OF_NORM = {n: op for n, op in OPERATORS.items() if op.__module__ == norm.__name__}
NORMS = [n for n, op in _OF_NORM.items() if f"{n}_backward" in _OF_NORM and "weight" in op.parameters]
ROWS, COLUMNS = ("x", "dy", "residual_grad"), ("weight", "bias")  # inputs [R, C], and those [C] in float32


def _arrays(op: str) -> list[str]:
    return [n for n in OPERATORS[op].parameters if n not in OPERATORS[op].defaults and n != "eps"]


def forward(op: str, device: Any, a: dict[str, Any]) -> dict[str, Any]:
    """y and the statistics, by the names that the backward has for them. a: the inputs by name."""
    statistics = [n for n in _arrays(f"{op}_backward") if n not in (*ROWS, *COLUMNS)]
    made = getattr(device, op)(*(a[n] for n in _arrays(op)), 1e-5)
    return dict(zip(["y", *statistics], made, strict=True))


def backward(op: str, device: Any, a: dict[str, Any], *, alone: bool = False) -> dict[str, Any]:
    """dx and the gradients that an option need_... names. a: inputs and statistics. alone: dx only, nothing added."""
    defaults = OPERATORS[f"{op}_backward"].defaults
    needs = [n for n in defaults if n.startswith("need_")]
    more = dict.fromkeys(needs, False) if alone else {n: a[n] for n in defaults if n in a}
    made = getattr(device, f"{op}_backward")(*(a[n] for n in _arrays(f"{op}_backward")), **more)
    return dict(zip(["dx", *(n.removeprefix("need_") for n in needs)], made, strict=True))


def check_layer_norm_of_equal_elements(device: Any, columns: int) -> None:
    """Check that the mean is the element and the deviation 0, although each sum of the elements is rounded."""
    eps, large = 1e-5, 1e12 * np.random.default_rng(1).random(40, np.float32)
    x = np.array([1000.1, -777.7, 0.3, *large], np.float32)[:, None].repeat(columns, axis=1)
    weight, bias = (device.upload(np.full(columns, n, np.float32)) for n in (1, 0))
    _, mean, rstd = (device.download(a) for a in device.layer_norm(device.upload(x), weight, bias, eps))
    np.testing.assert_allclose(mean, x[:, 0], rtol=1.2e-7)
    np.testing.assert_allclose(rstd[:3], eps**-0.5, rtol=1e-5)
    assert np.isfinite(rstd).all()  # of large ones a variance of a rounding error may be left, below 0 even
