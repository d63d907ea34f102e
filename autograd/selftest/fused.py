"""Self-test cases of `fused`: all functions, broadcasting, strides, output places, sums and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device
from wgrad.device.expression import BUILT_IN, FUNCTIONS

_LOAD: tuple[Any, ...] = (("load", 0), ("load", 1), ("load", 2))
_ROWS, _COLUMNS = 37, 53
_SHAPE = (3, _ROWS, _COLUMNS)
_WHOLE = (_ROWS * _COLUMNS, _COLUMNS, 1), 0
_VIEWS = (_WHOLE, ((0, _COLUMNS, 1), 0), ((0, 0, 1), 0))  # all of x, a matrix and a row of it repeated
_POSITIVE = {"log", "sqrt", "pow"}  # functions that get absolute values
_EACH = (6, 32)  # values of each function: a multiple of 64, so that a view may start after them


def cases(t: np.dtype) -> list[Case]:
    return [_functions(t), *_others(t)]


def _build(t: np.dtype) -> Callable[[np.random.Generator], Inputs]:
    def build(rng: np.random.Generator) -> Inputs:
        made = {"x": normal(rng, _SHAPE, t), "m": normal(rng, _SHAPE[1:], t), "b": normal(rng, _SHAPE[2:], t)}
        made["x"].reshape(-1)[:70] = made["m"].reshape(-1)[:70]  # equal numbers: `le` is not `lt`
        return made

    return build


def _case(name: str, t: np.dtype, call: Callable[[Device, tuple[Any, ...]], Any]) -> Case:
    def run(device: Device, x: Inputs) -> Outputs:
        made = call(device, (x["x"], x["m"], x["b"]))
        return made if isinstance(made, dict) else {"y": made}

    text = "x".join(map(str, _SHAPE))
    label = f"fused {name}/{text}/{dtype_name(t)}"
    return Case(label, "fused", "forward", dtype_name(t), text, _build(t), run, 2 * BUILTIN_ULPS)


def _functions(t: np.dtype) -> Case:
    """Return a case that applies all functions to the same operands in one launch. Axis 0 selects the function."""
    names = [name for name in FUNCTIONS if name in BUILT_IN]
    program: list[tuple[Any, ...]] = [*_LOAD, ("index", 0), ("abs", 0), ("scalar", 0)]
    value = 0
    for number, name in enumerate(names):
        first = 4 if name in _POSITIVE else 0
        operands = (first, *range(1, FUNCTIONS[name].arity))
        program += [(name, *operands), ("scalar", 1 + number), ("eq", 3, len(program) + 1)]
        program.append(("where", len(program) - 1, len(program) - 3, value))
        value = len(program) - 1
    shape = (len(names), *_EACH)
    views = ((0, 32, 1), 0), ((0, 32, 1), 0), ((0, 0, 1), 0)

    def call(device: Device, arrays: Any) -> Outputs:
        scalars = tuple(float(n) for n in range(len(names)))
        y = device.fused(tuple(program), arrays, views, (0.1, *scalars), shape, dtype=t)
        size = _EACH[0] * _EACH[1]
        return {name: device.view(y, _EACH, n * size) for n, name in enumerate(names)}

    return _case("functions", t, call)


def custom_cases(name: str, arity: int, domain: tuple[float, float], float16: bool) -> list[Case]:
    """Return cases of a registered function (custom_operator.py), in each dtype."""
    found = []
    for t in (F32, F16) if float16 else (F32,):

        def build(rng: np.random.Generator, t: np.dtype = t) -> Inputs:
            return {n: rng.uniform(*domain, _SHAPE[i:]).astype(t) for i, n in enumerate(("x", "m", "b"))}

        def run(device: Device, x: Inputs, t: np.dtype = t) -> Outputs:
            program = (*_LOAD[:arity], (name, *range(arity)))
            arrays = (x["x"], x["m"], x["b"])[:arity]
            return {"y": device.fused(program, arrays, _VIEWS[:arity], (), _SHAPE, dtype=t)}

        text = "x".join(map(str, _SHAPE))
        label = f"fused {name}/{text}/{dtype_name(t)}"
        found.append(Case(label, "fused", "forward", dtype_name(t), text, build, run, 2 * BUILTIN_ULPS))
    return found


def _others(t: np.dtype) -> list[Case]:
    product: tuple[Any, ...] = (*_LOAD, ("mul", 0, 1), ("scalar", 0), ("sub", 3, 4))
    transposed = ((_COLUMNS, 1, 0), 0), ((1, 0, 0), 0), ((0, 1, 0), 0)
    ragged = ((_ROWS * _COLUMNS, _COLUMNS, 2), 5), ((0, _COLUMNS, 1), 7), ((0, 0, 1), 3)
    calls: dict[str, Callable[[Device, Any], Any]] = {
        "transposed": lambda d, a: d.fused(product, a, transposed, (0.3,), (_ROWS, _COLUMNS, 1), dtype=t),
        "slices": lambda d, a: d.fused(product, a, ragged, (0.3,), (2, 11, 23), dtype=t),
        "index": lambda d, a: d.fused(
            (*_LOAD, ("index", 1), ("index", 2), ("lt", 3, 4), ("where", 5, 0, 2)), a, _VIEWS, (), _SHAPE, dtype=t
        ),
        "one number": lambda d, a: d.fused((("load", 0),), a[:1], (((), 9),), (), (), dtype=t),
        "to a place": lambda d, a: d.fused(
            product, a, ragged, (0.3,), (2, 11, 23), out=a[0], place=((_ROWS * _COLUMNS, _COLUMNS, 2), 3)
        ),
        "old": lambda d, a: d.fused((("old",), ("load", 0), ("mul", 0, 1)), a[1:2], _VIEWS[1:2], (), _SHAPE, out=a[0]),
        "exact GELU": lambda d, a: d.fused(
            (*_LOAD, ("scalar", 0), ("mul", 0, 3), ("gelu_exact", 4), ("gelu_exact_slope", 4), ("sub", 5, 6)),
            a, _VIEWS, (5.0,), _SHAPE, dtype=t,
        ),
        "accumulate": lambda d, a: d.fused(
            (("load", 0),), a[1:2], _VIEWS[1:2], (), _SHAPE, out=a[0], accumulate=True
        ),
        "sum into": lambda d, a: d.fused(
            (("load", 0),), a[:1], _VIEWS[:1], (), _SHAPE, reduce="sum", axes=(0, 1), out=a[2], accumulate=True
        ),
    }  # fmt: skip
    for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)):

        def call(device: Device, arrays: Any, axes: Any = axes) -> Any:
            kind = "max" if axes in ((1,), (0, 1, 2)) else "sum"
            return device.fused(product, arrays, _VIEWS, (0.3,), _SHAPE, reduce=kind, axes=axes, dtype=t)

        calls[f"over {','.join(map(str, axes))}"] = call
    return [_case(name, t, call) for name, call in calls.items()]
