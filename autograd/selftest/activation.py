"""Self-test cases of activations and their gated forms."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, forward_and_backward, normal
from wgrad.device.contract import Array, Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    name = dtype_name(t)
    for shape in ((7, 123), (1, 3), (33, 128)):
        text = "x".join(map(str, shape))

        def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
            return {n: normal(rng, shape, t, s) for n, s in (("x", 3.0), ("up", 1.0), ("dy", 1.0))}

        for op, names in (("silu", ["x"]), ("gelu", ["x"]), ("swiglu", ["x", "up"]), ("geglu", ["x", "up"])):

            def forward(device: Device, x: Inputs, op: str = op, names: list[str] = names) -> Outputs:
                return {"y": getattr(device, op)(*(x[n] for n in names))}

            def backward(device: Device, x: Inputs, op: str = op, names: list[str] = names) -> Outputs:
                arguments = (x["dy"], *(x[n] for n in names))
                # For all shapes but the first, the backward also writes the forward's result.
                again = _again(device, x["dy"]) if "up" in names and x["dy"].shape[0] != 7 else {}
                made = getattr(device, op + "_backward")(*arguments, **again)
                return {**dict(zip(("dgate", "dup"), made)), **again} if isinstance(made, tuple) else {"dx": made}

            found += forward_and_backward(op, text, name, build, forward, backward)
    for rows, half in ((7, 61), (33, 128)):
        found += _side_by_side(rows, half, t)
    return found


def _again(device: Device, dy: Array) -> Outputs:
    """Return the array into which the backward recomputes the forward's output."""
    return {"activated": device.empty(dy.shape, dy.dtype)}


def _side_by_side(rows: int, half: int, t: np.dtype) -> list[Case]:
    """Return cases with gate and up in one array."""
    found = []
    text = f"{rows}x2x{half}"

    def build(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, (rows, 2 * half), t, 2.0), "dy": normal(rng, (rows, half), t)}

    for op in ("swiglu", "geglu"):

        def forward(device: Device, x: Inputs, op: str = op) -> Outputs:
            return {"y": getattr(device, op)(x["x"])}

        def backward(device: Device, x: Inputs, op: str = op) -> Outputs:
            again = _again(device, x["dy"])
            return {"dx": getattr(device, op + "_backward")(x["dy"], x["x"], **again)[0], **again}

        found += forward_and_backward(op, text, dtype_name(t), build, forward, backward)
    return found
