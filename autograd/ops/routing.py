"""Mixture of experts: a router chooses k experts for each token, rows are grouped by expert, and the experts' outputs
are summed per token.

A slot is a pair of a token and one of its experts: slot t k + j is the j-th expert of token t. Rows of experts are in
the order of `Groups.order`: by expert, and within an expert by slot. The host never learns how many rows an expert has.
Sources: Shazeer et al., Outrageously Large Neural Networks (2017); Fedus et al., Switch Transformers (2022).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, DType

MOST_EXPERTS, MOST_CHOSEN = 1024, 64


class Groups(NamedTuple):
    """Slots grouped by expert.

    start: int32 [E + 1], the first row of each expert, and the number of rows.
    order: int32 [S], the slot of each row.
    place: int32 [T, k], the row of each slot.
    """

    start: Array
    order: Array
    place: Array

    @property
    def chosen(self) -> int:
        """Number of experts per token."""
        return int(self.place.shape[1])


def group(ids: Tensor | Array, experts: int, device: Any) -> Groups:
    """Group the slots of ids, int32 [T, k], by expert."""
    return Groups(*device.group_by_expert(ids.data if isinstance(ids, Tensor) else ids, experts))


# ---- the router ----------------------------------------------------------------------------------
@differentiable
def route(ctx: Context, logits: Tensor, chosen: int, normalize: bool, by: Array | None = None) -> Any:
    """logits [T, E] -> for each token the weights float32 [T, k] and ids int32 [T, k] of the experts with the k largest
    logits.

    by: float32 [T, E]; if given, the k largest of these are chosen instead. It gets no gradient.
    """
    weights, ids = ctx.device.route(logits, chosen, normalize, by)
    ctx.save(logits, ids)
    ctx.normalize = normalize
    return weights, ids


@route.backward
def _(ctx: Context, dweights: Array | None, _: Any) -> Any:
    logits, ids = ctx.saved
    if dweights is None:
        dweights = ctx.device.zeros(tuple(ids.shape))
    return (ctx.device.route_backward(dweights, logits, ids, ctx.normalize),)


@route.operator
def _(args: Args, logits: Array, chosen: int, normalize: bool, by: Array | None = None) -> None:
    """logits [T, E] -> weights float32 [T, chosen] and ids int32 [T, chosen] of the experts with the largest logits, or
    with the largest values of by float32 [T, E] if given; on a tie the lower id. weights: softmax over all logits;
    normalize: over the chosen ones alone."""
    args.array("logits", logits, "T E")
    if by is not None:
        args.array("by", by, "T E", "f32")
    _experts(args, args.size["E"], chosen)


def _experts(args: Args, experts: int, chosen: int) -> None:
    args.rule(0 < experts <= MOST_EXPERTS, f"there must be 1 to {MOST_EXPERTS} experts, got {experts}")
    most = min(experts, MOST_CHOSEN)
    args.rule(
        0 < chosen <= most, f"chosen must be from 1 to {most}, got {chosen}; it is the number of a token's experts"
    )


@route.reference
def _(logits: np.ndarray, chosen: int, normalize: bool, by: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    compute = compute_dtype(logits)
    wide = up(logits, compute)
    ids = np.argsort(-(wide if by is None else by), axis=1, kind="stable")[:, :chosen].astype(np.int32)
    picked = np.take_along_axis(wide, ids, axis=1)
    e = np.exp(picked - wide.max(axis=1, keepdims=True))
    total = e if normalize else np.exp(wide - wide.max(axis=1, keepdims=True))
    return finish(e / total.sum(axis=1, keepdims=True), np.float32, compute), ids


@operator
def route_backward(args: Args, dweights: Array, logits: Array, ids: Array, normalize: bool) -> None:
    """dweights [T, k], the gradient of `route`'s weights -> the gradient of logits [T, E], in their dtype."""
    args.array("dweights", dweights, "T k", "f32").array("logits", logits, "T E").array("ids", ids, "T k", "i32")
    _experts(args, args.size["E"], args.size["k"])


@route_backward.reference
def _(dweights: np.ndarray, logits: np.ndarray, ids: np.ndarray, normalize: bool) -> np.ndarray:
    compute = compute_dtype(dweights, logits)
    wide = up(logits, compute)
    e = np.exp(wide - wide.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    grad = np.zeros_like(p)
    np.put_along_axis(grad, ids, up(dweights, compute), axis=1)
    of = p
    if normalize:
        of = np.zeros_like(p)
        np.put_along_axis(of, ids, np.take_along_axis(e, ids, axis=1), axis=1)
        of /= of.sum(axis=1, keepdims=True)
    return finish(of * (grad - (of * grad).sum(axis=1, keepdims=True)), logits.dtype, compute)


# ---- rows by expert --------------------------------------------------------------------------------
@operator
def group_by_expert(args: Args, ids: Array, experts: int) -> None:
    """ids int32 [T, k], below `experts` -> start int32 [E + 1], order int32 [T k], place int32 [T, k] as in
    `Groups`."""
    args.array("ids", ids, "T k", "i32")
    args.rule(0 < experts <= MOST_EXPERTS, f"experts must be from 1 to {MOST_EXPERTS}, got {experts}")


@group_by_expert.reference
def _(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    place = np.empty_like(order)
    place[order] = np.arange(order.size, dtype=np.int32)
    start = np.zeros(experts + 1, np.int32)
    start[1:] = np.cumsum(np.bincount(flat, minlength=experts)[:experts])
    return start, order, place.reshape(ids.shape)


# ---- back to tokens --------------------------------------------------------------------------------
@differentiable
def combine(
    ctx: Context, y: Tensor, weights: Tensor, groups: Any, *, residual: Tensor | None = None, dtype: DType = None
) -> Tensor:
    """y [S, C], rows grouped by expert, and weights float32 [T, k] -> [T, C]: the weighted sum of each token's rows,
    plus residual [T, C]. groups: a `Groups`."""
    start, order, place = groups
    made = np.dtype(y.dtype if dtype is None else dtype)
    ctx.save(y, weights, order)
    ctx.residual_dtype = None if residual is None else residual.dtype
    out: Tensor = ctx.device.combine(y, place, weights, residual=residual, dtype=made)
    return out


@combine.backward
def _(ctx: Context, dsum: Array) -> Any:
    y, weights, order = ctx.saved
    dy = dweights = dresidual = None
    if ctx.needs_grad[0] or ctx.needs_grad[1]:
        dy, dweights = ctx.device.combine_backward(dsum, y, order, weights)
    if ctx.residual_dtype is not None and ctx.needs_grad[-2]:
        dresidual = dsum if dsum.dtype == ctx.residual_dtype else ctx.device.cast(dsum, ctx.residual_dtype)
    return dy, dweights, None, None, None, dresidual


@combine.operator
def _(
    args: Args,
    y: Array,
    place: Array,
    weights: Array | None = None,
    *,
    residual: Array | None = None,
    dtype: DType = None,
) -> dict[str, Any]:
    """y [S, C], place int32 [T, k] -> [T, C]: for each token the sum of the rows at its places, times weights float32
    [T, k] if given, + residual [T, C] if given."""
    args.array("y", y, "S C").array("place", place, "T k", "i32")
    args.rule(
        args.size["S"] == args.size["T"] * args.size["k"],
        f"y must have a row for each of {args.size['T'] * args.size['k']} places, got {args.size['S']}",
    )
    if weights is not None:
        args.array("weights", weights, "T k", "f32")
    if residual is not None:
        args.array("residual", residual, "T C")
    return {"dtype": args.dtype("dtype", dtype, y.dtype)}


@combine.reference
def _(
    y: np.ndarray, place: np.ndarray, weights: np.ndarray | None, residual: np.ndarray | None, dtype: Any
) -> np.ndarray:
    compute = compute_dtype(y, weights, residual)
    rows = up(y, compute)[place]
    if weights is not None:
        rows = rows * up(weights, compute)[:, :, None]
    out = rows.sum(axis=1)
    return finish(out if residual is None else out + up(residual, compute), dtype, compute)


@operator
def combine_backward(args: Args, dsum: Array, y: Array, order: Array, weights: Array) -> None:
    """dsum [T, C] -> the gradients of `combine`'s y [S, C], in y's dtype, and of weights float32 [T, k]."""
    args.array("dsum", dsum, "T C").array("y", y, "S C").array("order", order, "S", "i32")
    args.array("weights", weights, "T k", "f32")
    args.rule(
        args.size["S"] == args.size["T"] * args.size["k"],
        f"y must have a row for each of {args.size['T'] * args.size['k']} weights, got {args.size['S']}",
    )


@combine_backward.reference
def _(dsum: np.ndarray, y: np.ndarray, order: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    compute = compute_dtype(dsum, y, weights)
    given = up(dsum, compute)[order // weights.shape[1]]
    dweights = np.empty(weights.shape, compute)
    dweights.reshape(-1)[order] = (given * up(y, compute)).sum(axis=1)
    dy = given * up(weights, compute).reshape(-1)[order][:, None]
    return finish(dy, y.dtype, compute), finish(dweights, np.float32, compute)
