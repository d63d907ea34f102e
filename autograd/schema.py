"""The schema of every operator: argument shapes, dtypes and values, and the text of every error.

A device never checks an argument; what passes here fits the contract in `device.py`. An error names the operator
and the argument, the rule, what was received, and what to do next. How axes and dtypes are written: `schema_args.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.autograd.schema_args import Args
from wgrad.device.contract import Array, Device, NF4Array
from wgrad.device.errors import ShapeError

VALUE_DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_HEAD_DIM = 256


def _p(args: Args, p: float) -> None:
    args.rule(0 <= p < 1, f"p must be in [0, 1), got {p}; it is the probability of dropping an element")


def _salt(args: Args, stream: int) -> None:
    args.rule(0 <= stream < 2**32, f"stream must be in [0, 2^32), got {stream}; number the dropout layers from 0")


# ---- products ----------------------------------------------------------------------------
def gemm(
    device: Device,
    a: Array,
    b: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    dtype: Any = None,
) -> np.dtype:
    """a [M, K] or [K, M], b [K, N] or [N, K]; a leading batch axis on both -> dtype of the product."""
    args = Args("gemm", device)
    args.rule(math.isfinite(alpha), f"alpha must be finite, got {alpha}")
    batch = "B " if len(getattr(a, "shape", ())) == 3 else ""
    args.array("a", a, batch + ("K M" if trans_a else "M K"))
    args.array("b", b, batch + ("N K" if trans_b else "K N"), "weight", "check trans_a and trans_b")
    return args.dtype("dtype", dtype, a.dtype)


def linear(
    device: Device,
    op: str,
    x: Array,
    weight: Array | NF4Array,
    bias: Array | None,
    residual: Array | None,
    lora_a: Array | None,
    lora_b: Array | None,
    dtype: Any,
) -> np.dtype:
    """x [..., K], weight [N, K], bias [N], residual [..., N], lora_a [r, K], lora_b [N, r] -> dtype of y.

    Decoding calls this some hundred times a token with the same shapes, so what passed once is remembered.
    """
    arrays = (x, weight, bias, residual, lora_a, lora_b)
    key = (op, device.float16, device.bfloat16, dtype, *(_signature(a) for a in arrays))
    known = _passed.get(key)
    if known is None:
        known = _check_linear(device, op, x, weight, bias, residual, lora_a, lora_b, dtype)
        if len(_passed) >= 4096:
            _passed.clear()
        _passed[key] = known
    return known


_passed: dict[Any, np.dtype] = {}


def _signature(value: Any) -> Any:
    """What a check looks at."""
    if value is None:
        return None
    if isinstance(value, NF4Array):
        parts = (value.packed, value.absmax, value.nested_absmax, value.nested_code, value.nested_offset)
        return (tuple(value.shape), value.block_size, value.nested_block_size, *(_signature(p) for p in parts))
    shape = getattr(value, "shape", None)
    return type(value) if shape is None else (tuple(shape), value.dtype)


def _check_linear(
    device: Device,
    op: str,
    x: Array,
    weight: Array | NF4Array,
    bias: Array | None,
    residual: Array | None,
    lora_a: Array | None,
    lora_b: Array | None,
    dtype: Any,
) -> np.dtype:
    args = Args(op, device).array("x", x, "... K")
    quantised = isinstance(weight, NF4Array)
    args.rule(
        quantised == (op == "linear_nf4"),
        f"weight must be {'an array: call linear_nf4' if quantised else 'an NF4Array: call linear, or nf4_quantize it'}"
        f", got {type(weight).__name__}",
    )
    if isinstance(weight, NF4Array):
        nf4_array(args, "weight", weight)
        _weight_shape(args, weight.shape)
    else:
        hint = "a linear weight is [out, in]: transpose it if it is [in, out]"
        args.array("weight", weight, "N K", "weight", hint)
    if bias is not None:
        args.array("bias", bias, "N", "f32")
    if residual is not None:
        wanted = (*tuple(x.shape)[:-1], args.size["N"])
        args.array("residual", residual, "... N")
        args.rule(
            tuple(residual.shape) == wanted,
            f"residual must have the shape of the result {list(wanted)}, got {list(residual.shape)}; reshape it",
        )
    if lora_a is not None or lora_b is not None:
        args.array("lora.a", lora_a, "r K", "f32", "lora_A is [r, in]")
        args.array("lora.b", lora_b, "N r", "f32", "lora_B is [out, r]")
    return args.dtype("dtype", dtype, x.dtype)


def _weight_shape(args: Args, shape: tuple[int, int]) -> None:
    args.size.setdefault("N", shape[0])
    args.rule(
        shape[1] == args.size["K"],
        f"weight must be [N, K] with K = {args.size['K']} from x, got shape {list(shape)}; "
        "pass the weight of this layer ([out, in])",
    )


def lora(op: str, device: Device, scaling: float, dropout: float, seed: Array | None, stream: int) -> None:
    args = Args(op, device)
    args.rule(math.isfinite(scaling), f"lora.scaling must be finite, got {scaling}; it is alpha / r")
    _p(args, dropout)
    if dropout > 0:
        args.array("lora.seed", seed, "2", "u32", "dropout needs a seed")
        _salt(args, stream)


# ---- NF4 ---------------------------------------------------------------------------------
def nf4_array(args: Args, name: str, w: NF4Array) -> None:
    n = int(w.shape[0]) * int(w.shape[1])
    blocks = -(-n // w.block_size)
    again = "quantise the weight again or check the file that it came from"
    args.rule(
        w.block_size in BLOCK_SIZES, f"{name}.block_size must be one of {BLOCK_SIZES}, got {w.block_size}; {again}"
    )
    args.rule(
        w.value_dtype in VALUE_DTYPES,
        f"{name}.value_dtype must be one of {VALUE_DTYPES}, got {w.value_dtype!r}; {again}",
    )
    args.rule(
        int(w.packed.size) == -(-n // 2),
        f"{name}.packed must hold {-(-n // 2)} bytes for shape {list(w.shape)}, got {int(w.packed.size)}; {again}",
    )
    args.array(f"{name}.absmax", w.absmax, str(blocks), "u8" if w.nested else "f32", again)
    if w.nested:
        outer = -(-blocks // w.nested_block_size)
        args.array(f"{name}.nested_absmax", w.nested_absmax, str(outer), "f32", again)
        args.array(f"{name}.nested_code", w.nested_code, "256", "f32", again)
        args.array(f"{name}.nested_offset", w.nested_offset, "1", "f32", again)


def nf4_quantize(device: Device, w: Array, block_size: int) -> None:
    args = Args("nf4_quantize", device).array("w", w, "N K", "weight", "only matrices are quantised")
    args.rule(block_size in BLOCK_SIZES, f"block_size must be one of {BLOCK_SIZES}, got {block_size}; 64 is usual")


def nf4_dequantize(device: Device, w: NF4Array, dtype: Any) -> np.dtype:
    args = Args("nf4_dequantize", device)
    nf4_array(args, "w", w)
    return args.dtype("dtype", dtype, np.float32)


# ---- norms, activations, rotary ----------------------------------------------------------
def rms_norm(device: Device, x: Array, weight: Array, eps: float, dtype: Any, op: str = "rms_norm") -> np.dtype:
    args = Args(op, device).array("x", x, "... C").array("weight", weight, "C", "f32")
    args.rule(eps > 0, f"eps must be positive, got {eps}; rms_norm_eps of config.json is usually 1e-5")
    return args.dtype("dtype", dtype, x.dtype)


def unary(op: str, device: Device, x: Array, name: str = "x", kind: str = "float") -> Args:
    """An array of any shape."""
    return Args(op, device).array(name, x, " ".join(f"axis{i}" for i in range(len(getattr(x, "shape", ())))), kind)


def gated(op: str, device: Device, gate: Array, up: Array) -> None:
    unary(op, device, gate, "gate")
    _same(op, device, ("gate", gate), ("up", up))


def rope(device: Device, x: Array, cos: Array, sin: Array, positions: Array) -> None:
    args = Args("rope", device).array("x", x, "N H D", "float", "flatten batch and time into N")
    _tables(args, "x", cos, sin, positions)


def _tables(args: Args, name: str, cos: Array, sin: Array, positions: Array) -> None:
    """What goes with the array `name` [N, ..., D] that is rotated."""
    width = args.size["D"]
    args.rule(
        width % 2 == 0, f"{name} must have an even head width D (halves are rotated against each other), got {width}"
    )
    args.array("cos", cos, f"P {width // 2}", "f32", "a rotary table has D / 2 columns")
    args.array("sin", sin, f"P {width // 2}", "f32", "cos and sin are tables of one shape")
    args.array("positions", positions, "N", "i32")


# ---- attention ---------------------------------------------------------------------------
def attention(
    device: Device, q: Array, k: Array, v: Array, doc_start: Array, cache_len: Array, window: int, backward: bool
) -> None:
    args = Args("attention", device).array("q", q, "B T H D")
    args.array("k", k, "B S G D").array("v", v, "B S G D")
    args.array("doc_start", doc_start, "B T", "i32").array("cache_len", cache_len, "1", "i32")
    size = args.size
    args.rule(
        size["H"] % size["G"] == 0,
        f"q must have a multiple of the key heads G = {size['G']}, got H = {size['H']}; "
        "check num_attention_heads and num_key_value_heads",
    )
    args.rule(size["D"] <= MAX_HEAD_DIM, f"q must have a head width of at most {MAX_HEAD_DIM}, got {size['D']}")
    args.rule(size["T"] <= size["S"], f"k must hold a key for every query, got T = {size['T']} > S = {size['S']}")
    args.rule(window >= 0, f"window must be 0 (none) or positive, got {window}")
    args.rule(q.dtype == k.dtype == v.dtype, f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast")
    if backward:
        args.rule(
            size["T"] == size["S"],
            f"k must have as many tokens as q where a gradient is wanted, got T = {size['T']}, S = {size['S']}; "
            "use no_grad when decoding",
        )


def kv_append(
    device: Device, cache: Array, new: Array, cache_len: Array, start: int | None, *, look: bool = True
) -> None:
    args = Args("kv_append", device).array("cache", cache, "B S G D").array("new", new, "B T G D")
    _fits_cache(args, "new", args.size["T"], cache_len, start, look)
    _cache_dtype(args, "cache", cache, "new", new)


def rope_append(
    device: Device,
    new: tuple[Array, Array],
    tables: tuple[Array, Array, Array],
    caches: tuple[Array, Array],
    cache_len: Array,
    start: int | None,
    *,
    look: bool = True,
) -> None:
    """new: k, v; tables: cos, sin, positions; caches: keys, values."""
    (k, v), (keys, values) = new, caches
    args = Args("rope_append", device).array("k", k, "N G D", "float", "flatten batch and time into N")
    args.array("v", v, "N G D", "float", "flatten batch and time into N")
    _tables(args, "k", *tables)
    args.array("keys", keys, "B S G D").array("values", values, "B S G D")
    n, batch = args.size["N"], args.size["B"]
    args.rule(
        n % batch == 0,
        f"k must have as many tokens for each of the {batch} rows of the cache, got N = {n}; "
        "append the same number of tokens to every row",
    )
    _fits_cache(args, "k", n // batch, cache_len, start, look)
    for name, array in (("k", k), ("v", v), ("values", values)):
        _cache_dtype(args, "keys", keys, name, array)


def _cache_dtype(args: Args, cache_name: str, cache: Array, name: str, new: Array) -> None:
    wanted = f"the cache's dtype {cache.dtype}" if cache_name == "cache" else f"the dtype of {cache_name} {cache.dtype}"
    args.rule(cache.dtype == new.dtype, f"{name} must have {wanted}, got {new.dtype}; cast it")


def _fits_cache(args: Args, name: str, tokens: int, cache_len: Array, start: int | None, look: bool) -> None:
    """start: what the host knows cache_len[0] to be. look: into cache_len, where it is the reference's."""
    args.array("cache_len", cache_len, "1", "i32")
    keys = args.size["S"]
    args.rule(tokens <= keys, f"{name} must fit into the cache of {keys} tokens, got {tokens}; make a longer cache")
    first = int(cache_len[0]) if look and isinstance(cache_len, np.ndarray) else start
    if first is not None:
        args.rule(
            0 <= first <= keys - tokens,
            f"cache_len must leave room for {tokens} more tokens in the cache of {keys}, got {first}; "
            "make a longer cache",
        )


# ---- softmax family, plain operators -----------------------------------------------------
def _same(op: str, device: Device, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    (name, a), (other, b) = first, second
    unary(op, device, b, other)
    if tuple(a.shape) != tuple(b.shape):
        raise ShapeError(
            f"{op}: {other} must have the shape of {name} {list(a.shape)}, got {list(b.shape)}; "
            "reshape it (nothing is broadcast)"
        )


def same_shape(op: str, device: Device, a: Array, b: Array) -> None:
    unary(op, device, a, "a")
    _same(op, device, ("a", a), ("b", b))


def softmax(device: Device, x: Array) -> None:
    Args("softmax", device).array("x", x, "... C")


def mask(device: Device, x: Array, keep: Array) -> None:
    unary("mask", device, x)
    args = Args("mask", device)
    args.array("keep", keep, " ".join(str(n) for n in x.shape), "u32", "keep has one value for each of x")


def scale(device: Device, x: Array, alpha: float) -> None:
    unary("scale", device, x)
    Args("scale").rule(math.isfinite(alpha), f"alpha must be finite, got {alpha}")


def cast(device: Device, x: Array, dtype: Any) -> np.dtype:
    return unary("cast", device, x, kind="weight").dtype("dtype", dtype, x.dtype)


def bias(device: Device, x: Array, b: Array) -> None:
    Args("bias", device).array("x", x, "... C").array("b", b, "C", "f32")


def dropout(device: Device, x: Array, p: float, seed: Array, stream: int) -> None:
    unary("dropout", device, x)
    args = Args("dropout", device).array("seed", seed, "2", "u32")
    _p(args, p)
    _salt(args, stream)


def reshape(x: Array, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with its -1, if any, filled in."""
    size, known = math.prod(x.shape), math.prod(n for n in shape if n != -1)
    fits = shape.count(-1) <= 1 and all(n >= -1 for n in shape) and known > 0 and size % known == 0
    result = tuple(size // known if n == -1 else int(n) for n in shape) if fits else ()
    if not fits or math.prod(result) != size:
        raise ShapeError(
            f"reshape: shape must hold the {size} elements of {list(x.shape)}, got {list(shape)}; one axis may be -1"
        )
    return result


# ---- embedding, loss ---------------------------------------------------------------------
def embedding(device: Device, table: Array, ids: Array, dtype: Any) -> np.dtype:
    args = Args("embedding", device).array("table", table, "V C", "weight").array("ids", ids, "N", "i32", "flatten it")
    return args.dtype("dtype", dtype, np.float32)


def linear_cross_entropy(device: Device, x: Array, weight: Array, targets: Array) -> None:
    args = Args("linear_cross_entropy", device)
    args.array("x", x, "N C", "float", "flatten batch and time into N")
    args.array("weight", weight, "V C", "weight", "the output layer is [vocab, hidden]")
    args.array("targets", targets, "N", "i32", "one target for each row of x, -100 to ignore it")
