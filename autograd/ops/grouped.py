"""Linear layers of experts: rows that are grouped by expert, each times its expert's weight.

The weights of all experts of a layer are one array [E, N, K], or a frozen weight [E N, K] of any format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.decoded_weights import decoded_rows
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.quantize import frozen_weight
from wgrad.autograd.precision import compute_dtype, finish, store, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, DType
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.host_matmul import host_matmul


@differentiable
def grouped_linear(
    ctx: Context,
    x: Tensor,
    weight: Weight,
    groups: Any,
    *,
    gather: bool = False,
    alpha: float = 1.0,
    add: Tensor | None = None,
    dtype: DType = None,
) -> Tensor:
    """Multiply each row of x by the transposed weight [N, K] of its expert and by alpha, and add `add` [S, N]
    -> [S, N].

    x: rows grouped by expert, [S, K], in the order of groups (a `Groups`); with gather the tokens [T, K], from which
    the rows are taken.
    """
    start, order, place = groups
    made = np.dtype(x.dtype if dtype is None else dtype)
    taken = order if gather else None
    ctx.save(x if ctx.needs_grad[1] else None, weight if ctx.needs_grad[0] else None, start, taken, place)
    ctx.alpha, ctx.x_dtype, ctx.add_dtype = alpha, x.dtype, None if add is None else add.dtype
    out: Tensor = ctx.device.grouped_linear(x, weight, start, order=taken, alpha=alpha, add=add, dtype=made)
    return out


@grouped_linear.backward
def _(ctx: Context, dy: Array) -> Any:
    x, weight, start, taken, place = ctx.saved
    dx = dweight = dadd = None
    if ctx.needs_grad[0]:
        dx = ctx.device.grouped_linear_backward(dy, weight, start, alpha=ctx.alpha, dtype=ctx.x_dtype)
        if taken is not None:
            dx = ctx.device.combine(dx, place, dtype=ctx.x_dtype)
    if ctx.needs_grad[1]:
        buffer = ctx.grad_buffer(1)
        options = {"order": taken, "alpha": ctx.alpha, "out": buffer, "accumulate": buffer is not None}
        dweight = ctx.device.grouped_weight_grad(dy, x, start, **options)
        dweight = dweight if buffer is None else None
    if ctx.add_dtype is not None and ctx.needs_grad[-2]:
        dadd = dy if dy.dtype == ctx.add_dtype else ctx.device.cast(dy, ctx.add_dtype)
    return dx, dweight, None, None, None, None, None, dadd


def _check(args: Args, weight: Any, start: Array) -> int:
    """Check the weight and its bounds, and return the number of rows of one expert's weight."""
    args.array("start", start, "bounds", "i32")
    experts = args.size["bounds"] - 1
    args.rule(experts > 0, "start must have the bounds of at least one expert, got 1 number")
    if not isinstance(weight, FrozenWeight):
        args.array("weight", weight, f"{experts} N K", "weight", "the weights of all experts are one array")
        return args.size["N"]
    frozen_weight(args, "weight", weight)
    args.axes("weight", weight, "EN K", "pass the weights of all experts of this layer ([E out, in])")
    args.rule(not weight.parts, "weight must be no stack of several projections, got one")
    rows, rest = divmod(args.size["EN"], experts)
    args.rule(not rest, f"weight must have as many rows for each of {experts} experts, got {args.size['EN']}")
    return rows


def _check_rows(args: Args, x: Array, order: Array | None, name: str = "x") -> None:
    """Check x [S, K], or with order x [T, K]."""
    if order is None:
        args.array(name, x, "S K")
        return
    args.array(name, x, "T K").array("order", order, "S", "i32")
    args.rule(
        args.size["S"] % args.size["T"] == 0,
        f"order must have as many slots for each of {args.size['T']} rows of {name}, got {args.size['S']}",
    )


@grouped_linear.operator
def _(
    args: Args,
    x: Array,
    weight: Any,
    start: Array,
    *,
    order: Array | None = None,
    alpha: float = 1.0,
    add: Array | None = None,
    dtype: DType = None,
) -> dict[str, Any]:
    """Row s of x [S, K] times the transposed weight of expert e, where start[e] <= s < start[e + 1], times alpha, + add
    [S, N] -> [S, N]. weight [E, N, K] (frozen: [E N, K]). start: int32 [E + 1], from 0 to S. order: int32 [S]; row s
    is then row order[s] // (S / T) of x [T, K]."""
    rows = _check(args, weight, start)
    _check_rows(args, x, order)
    if add is not None:
        args.array("add", add, f"S {rows}")
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@grouped_linear.reference
def _(
    x: np.ndarray,
    weight: Any,
    start: np.ndarray,
    order: np.ndarray | None,
    alpha: float,
    add: np.ndarray | None,
    dtype: Any,
) -> np.ndarray:
    compute = _compute(weight, x, add)
    left = _taken(up(x, compute), order)
    n = rows_of_expert(weight, start)
    y = np.zeros((left.shape[0], n), compute)
    for expert, rows in _experts(start):
        y[rows] = host_matmul(left[rows], _of_expert(weight, expert, n, compute).T)
    y *= compute.type(alpha)
    return finish(y if add is None else y + up(add, compute), dtype, compute)


@operator
def grouped_linear_backward(
    args: Args, dy: Array, weight: Any, start: Array, *, alpha: float = 1.0, dtype: DType = None
) -> dict[str, Any]:
    """dy [S, N] -> the gradient of the rows [S, K] of `grouped_linear`; default dtype: dy's."""
    rows = _check(args, weight, start)
    args.array("dy", dy, f"S {rows}")
    return {"dtype": args.dtype("dtype", dtype, dy.dtype)}


@grouped_linear_backward.reference
def _(dy: np.ndarray, weight: Any, start: np.ndarray, alpha: float, dtype: Any) -> np.ndarray:
    compute = _compute(weight, dy)
    grad, n = up(dy, compute), dy.shape[1]
    dx = np.zeros((grad.shape[0], weight.shape[-1]), compute)
    for expert, rows in _experts(start):
        dx[rows] = host_matmul(grad[rows], _of_expert(weight, expert, n, compute))
    dx *= compute.type(alpha)
    return finish(dx, dtype, compute)


@operator
def grouped_weight_grad(
    args: Args,
    dy: Array,
    x: Array,
    start: Array,
    *,
    order: Array | None = None,
    alpha: float = 1.0,
    out: Array | None = None,
    accumulate: bool = False,
) -> None:
    """dy [S, N], x as in `grouped_linear` -> float32 [E, N, K]: alpha times each expert's rows of dy, transposed, times
    its rows of x (+ out when `accumulate`)."""
    args.array("dy", dy, "S N").array("start", start, "bounds", "i32")
    _check_rows(args, x, order)
    args.rule(out is not None or not accumulate, "out must be given where the result is added to it, got None")
    args.rule(args.size["bounds"] > 1, "start must have the bounds of at least one expert, got 1 number")
    if out is not None:
        args.array("out", out, f"{args.size['bounds'] - 1} N K", "f32")


@grouped_weight_grad.reference
def _(
    dy: np.ndarray,
    x: np.ndarray,
    start: np.ndarray,
    order: np.ndarray | None,
    alpha: float,
    out: np.ndarray | None,
    accumulate: bool,
) -> np.ndarray:
    compute = compute_dtype(dy, x, out)
    grad, right = up(dy, compute), _taken(up(x, compute), order)
    found = np.zeros((start.size - 1, dy.shape[1], x.shape[1]), compute)
    for expert, rows in _experts(start):
        found[expert] = host_matmul(grad[rows].T, right[rows])
    found *= compute.type(alpha)
    return store(found, out, accumulate, np.float32, compute)


def _compute(weight: Any, *others: np.ndarray | None) -> np.dtype:
    arrays = weight.arrays().values() if isinstance(weight, FrozenWeight) else (weight,)
    return compute_dtype(*arrays, *others)


def rows_of_expert(weight: Any, start: Array) -> int:
    """Return N, the number of rows of one expert's weight."""
    n: int = weight.shape[0] // (start.size - 1) if isinstance(weight, FrozenWeight) else weight.shape[1]
    return n


def _taken(x: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Return the rows in the order of experts."""
    return x if order is None else x[order // (order.size // x.shape[0])]


def _experts(start: np.ndarray) -> list[tuple[int, slice]]:
    """Return the experts that have rows, each with its rows."""
    bounds = start.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a]


def _of_expert(weight: Any, expert: int, n: int, compute: np.dtype) -> np.ndarray:
    if isinstance(weight, FrozenWeight):
        return decoded_rows(weight, expert * n, expert * n + n, compute)
    return up(weight[expert], compute)
