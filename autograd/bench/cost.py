"""Least work of one operator call, counted from its arguments: FLOP, and bytes read from and written to memory.

Bytes: each input is read once, each output is written once; scratch does not count. FLOP of products and attention are
exact: a multiplication and an addition are two, causal attention is half of its square, its backward is 2.5 forwards,
even if a kernel recomputes something. Other operators count the operations of their formula, an exponential or a
division as one: enough to see that memory bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wgrad.device.formats.frozen_weight import FrozenWeight

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    flop: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.nbytes


# FLOP for each element of an operator's largest array; operators that are not in the table take the usual number.
_USUAL_PER_ELEMENT = 4
_PER_ELEMENT = {
    "silu": 4, "silu_backward": 8, "gelu": 9, "gelu_backward": 17, "swiglu": 5, "swiglu_backward": 11, "geglu": 10,
    "geglu_backward": 20, "mask": 1, "add": 1, "mul": 1, "scale": 1, "scale_by": 1, "softcap": 3, "cast": 1, "bias": 1,
    "sum_rows": 1, "sum": 1, "dropout": 20, "fused": 10, "embedding": 1,
    "embedding_backward": 1, "quantize": 20, "quantize_scales": 20, "dequantize": 2, "round_weight": 500,
    "rms_norm": 4, "rms_norm_backward": 11, "layer_norm": 8, "layer_norm_backward": 15, "grad_norm": 2, "adamw": 14,
    "rope": 3, "rope_split": 3, "rope_split_backward": 3, "rope_append": 3, "advance": 1,
    "paged_append": 3,
    "softmax": 5, "softmax_backward": 4, "kv_append": 1, "sample": 6, "clip": 3, "short_conv": 12,
    "short_conv_backward": 24, "route": 6, "route_backward": 8, "group_by_expert": 1, "combine": 2,
    "combine_backward": 3, "place_experts": 1, "keep_experts": 1, "gather_experts": 1, "copy_experts": 1,
}  # fmt: skip
# Arguments that an operator writes besides its result, and arguments that it reads in part.
_WRITTEN = {"adamw": ("p", "exp_avg", "exp_avg_sq"), "clip": ("state", "loss_scale")}
_WRITTEN |= {"advance": ("step", "ids", "positions", "cache_len", "uniform"), "rms_norm_backward": ("rounded",)}
_WRITTEN |= dict.fromkeys(("place_experts", "keep_experts"), ("held", "used", "counts"))
_WRITTEN |= {"copy_experts": ("out",), "gather_experts": ("kept", "out")}
_WRITTEN |= dict.fromkeys(("swiglu_backward", "geglu_backward"), ("activated",))
_IN_PART = {"embedding": ("table",), "kv_append": ("cache",), "rope_append": ("keys", "values")}
_IN_PART |= {
    "advance": ("tokens", "uniforms"),
    "paged_append": ("keys", "values"),
    "paged_attention": ("keys", "values"),
}


def cost(op: str, arguments: Arguments, made: Any) -> Cost:
    """Return the cost of one call. arguments: by name; made: result of the call."""
    count = _FLOP.get(op)
    largest = max(map(_size, _arrays((arguments, made))))
    flop = count(arguments) if count is not None else _PER_ELEMENT.get(op, _USUAL_PER_ELEMENT) * largest
    return Cost(float(flop), float(_bytes(op, arguments, made)))


def _bytes(op: str, given: Arguments, made: Any) -> int:
    apart = ("rounded", "activated", *_IN_PART.get(op, ()), *(() if given.get("accumulate") else ("out",)))
    read = sum(a.nbytes for a in _arrays({n: v for n, v in given.items() if n not in apart}))
    written = sum(a.nbytes for a in _arrays(made)) + sum(
        a.nbytes for name in _WRITTEN.get(op, ()) for a in _arrays(given.get(name))
    )
    if op == "embedding":  # reads only the rows of these ids
        table, ids = given["table"], given["ids"]
        looked_up: int = math.prod(ids.shape) * table.shape[1] * table.dtype.itemsize
        return int(read + written) + looked_up
    if op == "paged_attention":  # reads the pages of each row
        page: int = math.prod(given["keys"].shape[1:]) * given["keys"].dtype.itemsize
        pages: int = math.prod(given["pages"].shape)
        return int(read + written) + 2 * pages * page
    if op in ("kv_append", "rope_append", "paged_append"):  # writes the new keys and values
        written += given["new"].nbytes if op == "kv_append" else given["k"].nbytes + given["v"].nbytes
    return int(read + written)


def _arrays(value: Any) -> Iterator[Any]:
    """Yield every array in arguments or a result."""
    if isinstance(value, FrozenWeight):
        yield from _arrays(value.arrays())
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _arrays(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from _arrays(part)
    elif hasattr(value, "nbytes") and not isinstance(value, type):
        yield value


def _size(array: Any) -> int:
    return math.prod(array.shape)


# ---- products ----------------------------------------------------------------------------------
def product_flop(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k


def attention_flop(queries: tuple[int, ...], keys: int) -> float:
    """Return the FLOP of a forward; it is causal if there are as many keys as queries. queries: shape [B, T, H, D]."""
    b, t, h, d = queries
    return 4.0 * b * h * d * t * (keys / 2 if keys == t else keys)


ATTENTION_BACKWARD = 2.5  # products of the backward for one of the forward


def _gemm(given: Arguments) -> float:
    a, b = given["a"].shape, given["b"].shape
    m, k = a[:-3:-1] if given.get("trans_a") else a[-2:]
    n = b[-2] if given.get("trans_b") else b[-1]
    result: float = math.prod(a[:-2]) * product_flop(m, n, k) + _lowrank(given, m, n)
    return result


def _lowrank(given: Arguments, m: int, n: int) -> float:
    lowrank = given.get("lowrank")
    return product_flop(m, n, lowrank[0].shape[1]) if lowrank else 0.0


def _linear(given: Arguments) -> float:
    n, k = given["weight"].shape
    backward = "dy" in given
    m = (given["dy"] if backward else given["x"]).shape[0]
    return product_flop(m, n, k) + _lowrank(given, m, k if backward else n)


def _lora_du(given: Arguments) -> float:
    m, n = given["dy"].shape
    return product_flop(m, n, given["b"].shape[1])


def _lora_db(given: Arguments) -> float:
    m, n = given["dy"].shape
    return product_flop(m, n, given["u"].shape[1] // len(given["parts"]))


def _lora_grads(given: Arguments) -> float:
    m, n = given["dy"].shape
    return 2 * product_flop(m, n, given["b"].shape[1])


def _attention(given: Arguments) -> float:
    return attention_flop(tuple(given["q"].shape), given["k"].shape[1])


def _loss(given: Arguments) -> float:
    """Return the FLOP of the logits, and as many for each gradient."""
    products = 1 + bool(given.get("need_dx", True)) + bool(given.get("need_dweight", False))
    (n, c), v = given["x"].shape, given["weight"].shape[0]
    result: float = products * product_flop(n, v, c) + 6.0 * n * v
    return result


def _paged_attention(given: Arguments) -> float:
    """Return the FLOP where each query sees all keys of its row's pages."""
    return attention_flop(given["q"].shape, given["pages"].shape[1] * given["keys"].shape[1])


def _delta_rule(given: Arguments) -> float:
    """Return the FLOP: a token decays each head's state, reads it twice and changes it once."""
    batch, tokens, heads = given["g"].shape
    keys = given["key_dim"]
    values = (given["qkv"].shape[2] - 2 * given["key_heads"] * keys) / heads
    result: float = 7.0 * batch * tokens * heads * keys * values
    return result


def _ssd(given: Arguments) -> float:
    """Return the FLOP: a token decays each head's state, changes it once and reads it once."""
    batch, tokens, heads = given["g"].shape
    wide = given["state_dim"]
    width = (given["xbc"].shape[2] - 2 * given["groups"] * wide) / heads
    result: float = 5.0 * batch * tokens * heads * wide * width
    return result


def _scan(given: Arguments) -> float:
    """Return the FLOP: a token decays each channel's states, changes them once and reads them once."""
    result: float = 7.0 * math.prod(given["x"].shape) * (given["weight"].shape[1] - 2)
    return result


def _grouped(given: Arguments) -> float:
    """Return the FLOP of each row times one expert's weight."""
    order = given.get("order")
    rows: int = (given.get("x", given.get("dy")) if order is None else order).shape[0]
    if "weight" not in given:
        return product_flop(rows, given["dy"].shape[1], given["x"].shape[1])
    return product_flop(rows, math.prod(given["weight"].shape), 1) / float(given["start"].shape[0] - 1)


_FLOP: dict[str, Callable[[Arguments], float]] = {
    "gemm": _gemm,
    "linear_quantized": _linear,
    "linear_quantized_backward": _linear,
    "lora_du": _lora_du,
    "lora_db": _lora_db,
    "lora_grads": _lora_grads,
    **dict.fromkeys(("grouped_linear", "grouped_linear_backward", "grouped_weight_grad"), _grouped),
    "attention": _attention,
    "paged_attention": _paged_attention,
    "attention_backward": lambda given: ATTENTION_BACKWARD * _attention(given),
    "linear_cross_entropy": _loss,
    "delta_rule": _delta_rule,
    "delta_rule_backward": lambda given: ATTENTION_BACKWARD * _delta_rule(given),
    "ssd": _ssd,
    "ssd_backward": lambda given: ATTENTION_BACKWARD * _ssd(given),
    "selective_scan": _scan,
    "selective_scan_backward": lambda given: ATTENTION_BACKWARD * _scan(given),
}
# Operators that tensor cores can compute.
_RECURRENCES = {f"{op}{half}" for op in ("delta_rule", "ssd", "selective_scan") for half in ("", "_backward")}
PRODUCTS = frozenset(_FLOP) - _RECURRENCES - {"paged_attention"}
