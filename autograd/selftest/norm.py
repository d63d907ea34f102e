"""Self-test cases of RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def cases(dtype: np.dtype) -> list[Case]:
    return _norm_cases(dtype) + _layer_norm_cases(dtype)


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
    rounded: bool = False,
    backward: bool = False,
) -> Case:
    """Return a case of RMSNorm or its backward.

    given: whether the call names the dtypes of results. rounded: whether dx is also written in dy's dtype.
    """
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
        arguments = (x[n] for n in ("dy", "x", "weight", "rstd"))
        more = {"residual_grad": x.get("residual_grad"), "need_dweight": dweight}
        again = {"rounded": device.empty((r, c), x["dy"].dtype)} if rounded else {}
        dx, dw = device.rms_norm_backward(*arguments, **more, **again, **options)
        return {"dx": dx, **({"dweight": dw} if dweight else {}), **again}

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
        found += [
            _norm("rounded", r, c, F32, F16, residual=True, dweight=False, rounded=True, backward=True)
            for r, c in ((41, 123), (3, 1004), (2, 9001))
        ]
        found.append(_norm("mixed, default dtype", 41, 123, F32, F16, given=False, residual=True, backward=True))
    return found


def _layer_norm(
    variant: str,
    r: int,
    c: int,
    x_dtype: Any,
    y_dtype: Any,
    *,
    mean: float = 0.0,
    dweight: bool = True,
    dbias: bool = True,
    backward: bool = False,
) -> Case:
    """Return a case of LayerNorm or its backward. mean: the mean of x, whose standard deviation is 1."""
    wanted = {"dx": True, "dweight": dweight, "dbias": dbias}

    def build(rng: np.random.Generator) -> Inputs:
        x, weight = (mean + normal(rng, (r, c))).astype(x_dtype), 1 + normal(rng, (c,), scale=0.2)
        inputs = {"x": x, "weight": weight, "bias": normal(rng, (c,))}
        statistics = dict(zip(("mean", "rstd"), ReferenceDevice().layer_norm(*inputs.values(), 1e-5)[1:]))
        return {**inputs, **statistics, "dy": normal(rng, (r, c), y_dtype)}

    def forward(device: Device, x: Inputs) -> Outputs:
        options = {} if x_dtype == y_dtype else {"dtype": y_dtype}
        made = device.layer_norm(x["x"], x["weight"], x["bias"], 1e-5, **options)
        return dict(zip(("y", "mean", "rstd"), made))

    def back(device: Device, x: Inputs) -> Outputs:
        arguments = (x[n] for n in ("dy", "x", "weight", "mean", "rstd"))
        made = device.layer_norm_backward(*arguments, need_dweight=dweight, need_dbias=dbias)
        return {name: array for (name, want), array in zip(wanted.items(), made) if want}

    op = "layer_norm_backward" if backward else "layer_norm"
    shape, dtypes = f"{r}x{c}", f"{dtype_name(x_dtype)}>{dtype_name(y_dtype)}"
    name, direction = f"{op}/{variant}/{shape}/{dtypes}", "backward" if backward else "forward"
    return Case(name, op, direction, dtypes, shape, build, back if backward else forward)


def _layer_norm_cases(t: np.dtype) -> list[Case]:
    shapes = ((5, 64), (7, 123), (133, 40), (3, 1003), (33, 576), (1, 2052), (2, 9001))
    found = [_layer_norm("plain", r, c, t, t, backward=b) for r, c in shapes for b in (False, True)]
    found += [
        _layer_norm("no dweight", 41, 123, t, t, dweight=False, backward=True),
        _layer_norm("no dbias", 41, 123, t, t, dbias=False, backward=True),
        _layer_norm("dx alone", 41, 123, t, t, dweight=False, dbias=False, backward=True),
    ]
    found += [_layer_norm("mean 1000", 41, c, t, t, mean=1e3, backward=b) for c in (123, 576) for b in (False, True)]
    if t == F16:
        found += [_layer_norm("mixed", 41, 123, F32, F16, backward=b) for b in (False, True)]
    return found
