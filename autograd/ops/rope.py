"""Rotary position embedding, half-split or interleaved.

With tables of J columns, J <= D/2, element i < J of a head is paired with i + J (half-split), or element 2 i with
2 i + 1 (`interleaved`). Elements from 2 J on are not rotated (partial rotary embedding).
Source: Su et al., RoFormer (2021).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.decoding import append, cache_dtype, fits_cache
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.device.errors import WgradError


def rotary_tables(args: Args, name: str, cos: Array, sin: Array) -> None:
    """Check the tables by which the array `name` [N, ..., D] is rotated."""
    width = args.size["D"]
    args.rule(
        width % 2 == 0, f"{name} must have an even head width D (halves are rotated against each other), got {width}"
    )
    args.array("cos", cos, "P J", "f32").array("sin", sin, "P J", "f32", "cos and sin are tables of one shape")
    columns = args.size["J"]
    args.rule(
        0 < columns <= width // 2,
        f"cos must have at most D / 2 = {width // 2} columns, one for each rotated pair, got {columns}",
    )


def _tables(args: Args, name: str, cos: Array, sin: Array, positions: Array) -> None:
    """Check the tables and positions by which the array `name` [N, ..., D] is rotated."""
    rotary_tables(args, name, cos, sin)
    args.array("positions", positions, "N", "i32")


@differentiable
def rope(ctx: Context, x: Tensor, cos: Array, sin: Array, positions: Array, *, interleaved: bool = False) -> Tensor:
    """x [N, H, D], cos and sin float32 [P, J], J <= D/2, positions int32 [N]; half-split, or `interleaved`."""
    ctx.save(cos, sin, positions, interleaved)
    out: Tensor = ctx.device.rope(x, cos, sin, positions, interleaved=interleaved)
    return out


@rope.backward
def _(ctx: Context, dy: Array) -> Any:
    *tables, interleaved = ctx.saved
    return (ctx.device.rope(dy, *tables, inverse=True, interleaved=interleaved),)


@rope.operator
def _(
    args: Args,
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    inverse: bool = False,
    interleaved: bool = False,
) -> None:
    """x [N, H, D]; cos, sin float32 [P, J], J <= D/2, including any scaling; positions int32 [N]. Half-split: element
    i < J pairs with i + J; interleaved: 2 i with 2 i + 1. `inverse` rotates back, as the backward does."""
    args.array("x", x, "N H D", "float", "flatten batch and time into N")
    _tables(args, "x", cos, sin, positions)


@rope.reference
def rotate(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    inverse: bool = False,
    interleaved: bool = False,
) -> np.ndarray:
    """x [N, H, D], cos and sin [P, J], positions [N] -> [N, H, D] in x's dtype (float64 if an argument is float64)."""
    compute = compute_dtype(x, cos, sin)
    half = cos.shape[1]
    c, s = up(cos, compute)[positions][:, None, :], up(sin, compute)[positions][:, None, :]
    if inverse:
        s = -s
    if interleaved:
        rest = up(x[..., 2 * half :], compute)
        first, second = (up(x[..., side : 2 * half : 2], compute) for side in (0, 1))
        pairs = np.stack([first * c - second * s, second * c + first * s], axis=-1)
        return finish(np.concatenate([pairs.reshape(*x.shape[:-1], 2 * half), rest], axis=-1), x.dtype, compute)
    first, second, rest = (up(part, compute) for part in np.split(x, (half, 2 * half), axis=-1))
    return finish(np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1), x.dtype, compute)


@differentiable
def rope_split(
    ctx: Context,
    qkv: Tensor,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [N, (H + 2 G) D], a token's H queries, G keys and G values side by side -> rope of q [N, H, D] and of
    k [N, G, D], and v [N, G, D]."""
    ctx.save(cos, sin, positions, interleaved)
    result: tuple[Tensor, Tensor, Tensor] = ctx.device.rope_split(
        qkv, cos, sin, positions, heads=heads, kv_heads=kv_heads, interleaved=interleaved
    )
    return result


@rope_split.backward
def _(ctx: Context, *grads: Array | None) -> Any:
    dq, dk, dv = grads
    if dq is None or dk is None or dv is None:
        raise WgradError("rope_split: q, k and v must all have a gradient, got none for one; use all three")
    *tables, interleaved = ctx.saved
    return (ctx.device.rope_split_backward(dq, dk, dv, *tables, interleaved=interleaved),)


@rope_split.operator
def _(
    args: Args,
    qkv: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
) -> None:
    """qkv [N, (H + 2 G) D]; heads H, kv_heads G; the rest as in `rope` -> q [N, H, D], k [N, G, D], v [N, G, D]."""
    args.array("qkv", qkv, "N W", "float")
    width, count = args.size["W"], heads + 2 * kv_heads
    args.rule(
        heads > 0 and kv_heads > 0 and width % (2 * count) == 0,
        f"qkv must have {heads} + 2 * {kv_heads} heads of even width side by side, got {width} columns",
    )
    args.size["D"] = width // count
    _tables(args, "qkv", cos, sin, positions)


@rope_split.reference
def _(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    heads: int,
    kv_heads: int,
    interleaved: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = np.split(qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, -1), (heads, heads + kv_heads), axis=1)
    value = finish(v, qkv.dtype, compute_dtype(qkv, cos, sin))
    q, k = (rotate(x, cos, sin, positions, False, interleaved) for x in (q, k))
    return q, k, value


@operator
def rope_split_backward(
    args: Args,
    dq: Array,
    dk: Array,
    dv: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    interleaved: bool = False,
) -> None:
    """dq [N, H, D], dk and dv [N, G, D] of one dtype -> dqkv [N, (H + 2 G) D], with dq and dk rotated back."""
    args.array("dq", dq, "N H D", "float").array("dk", dk, "N G D", "float").array("dv", dv, "N G D", "float")
    args.rule(
        dq.dtype == dk.dtype == dv.dtype, f"dq, dk, dv must share a dtype, got {dq.dtype}, {dk.dtype}, {dv.dtype}; cast"
    )
    _tables(args, "dq", cos, sin, positions)


@rope_split_backward.reference
def _(
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    interleaved: bool,
) -> np.ndarray:
    compute = compute_dtype(dq, dk, dv, cos, sin)
    back = [rotate(x, cos, sin, positions, True, interleaved) for x in (dq, dk)]
    return finish(np.concatenate([*back, dv], axis=1).reshape(dq.shape[0], -1), dq.dtype, compute)


@operator
def rope_append(
    args: Args,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    keys: Array,
    values: Array,
    cache_len: Array,
    *,
    interleaved: bool = False,
) -> None:
    """Apply `rope` to k, then `kv_append` to the result and to v, in one launch, in place on keys and values:
    keys[:, cache_len[0] : cache_len[0] + T] = rope(k), values[...] = v. k, v [B T, G, D]; keys, values
    [B, S, G, D]; all of one dtype; cos, sin, positions [B T] as in `rope`. For decoding: there is no backward."""
    args.array("k", k, "N G D", "float", "flatten batch and time into N")
    args.array("v", v, "N G D", "float", "flatten batch and time into N")
    _tables(args, "k", cos, sin, positions)
    args.array("keys", keys, "B S G D").array("values", values, "B S G D")
    n, batch = args.size["N"], args.size["B"]
    args.rule(
        n % batch == 0,
        f"k must have as many tokens for each of the {batch} rows of the cache, got N = {n}; "
        "append the same number of tokens to every row",
    )
    fits_cache(args, "k", n // batch, cache_len)
    for name, array in (("k", k), ("v", v), ("values", values)):
        cache_dtype(args, "keys", keys, name, array)


@rope_append.reference
def _(
    k: np.ndarray,
    v: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    cache_len: np.ndarray,
    interleaved: bool,
) -> None:
    for cache, new in ((keys, rotate(k, cos, sin, positions, False, interleaved)), (values, v)):
        append(cache, new.reshape(cache.shape[0], -1, *cache.shape[2:]), int(cache_len[0]))
