"""Flash attention forward on the tensor cores. Kernels: attention_forward.hip, attention_combine.hip."""

from __future__ import annotations

import os
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array
from wgrad.hip.attention.attention_backward import KINDS, served
from wgrad.hip.attention.attention_plain import plain_attention
from wgrad.hip.attention.attention_widths import kernel_width, narrowed, widened
from wgrad.hip.elements import implements
from wgrad.hip.runtime.architectures import dies
from wgrad.hip.runtime.runtime import Runtime

ROUNDINGS = ("rtne", "rtna", "rtz")
_TILE_KEYS = 64
_MIN_TILES = 4  # of keys in a share: less is not worth the second kernel
_MAX_SPLITS = 16
_DECODING_KEYS = 2048


class AttentionRounding(Runtime):
    """A runtime with the setting `attention_rounding`: how a bfloat16 forward rounds probabilities.

    "rtne" (to nearest even, the default), "rtna" (to nearest, ties away from zero) or "rtz" (towards zero: fastest,
    biased low). $WGRAD_ATTENTION_ROUNDING sets it for a process.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.attention_rounding = os.environ.get("WGRAD_ATTENTION_ROUNDING", "rtne")

    @property
    def attention_rounding(self) -> str:
        return self._rounding

    @attention_rounding.setter
    def attention_rounding(self, mode: str) -> None:
        if mode not in ROUNDINGS:
            raise DeviceError(f"attention_rounding (or $WGRAD_ATTENTION_ROUNDING) is '{mode}'; use one of {ROUNDINGS}")
        self._rounding = mode


@implements("attention")
def attention(
    device: AttentionRounding,
    q: Array,
    k: Array,
    v: Array,
    doc_start: Array,
    cache_len: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array]:
    """Use the tensor cores for float16 and bfloat16 with heads of 33 to 256 elements, else the plain kernels.

    The plain kernels also serve unaligned arrays, a scale <= 0, a soft-cap, and one query on few keys.
    """
    # Two tiles beyond the last key are addressed too, and not read.
    rows = max((k.shape[1] + 2 * _TILE_KEYS) * k.shape[2], q.shape[1] * q.shape[2])
    if not served((q, k, v), rows, scale, softcap) or _short_decoding(q, k):
        return plain_attention(device, q, k, v, doc_start, cache_len, scale, window, softcap)
    narrow = q.shape[3]
    q, k, v = (widened(device, x, kernel_width(narrow)) for x in (q, k, v))
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    kind = KINDS[q.dtype.name]
    mode = f"{kind}_{device.attention_rounding}" if kind == "bf16" else kind
    block, threads = block_of(device.wave, width)
    blocks = -(-queries // block)
    splits = _shares(device, blocks * heads * batch, keys)
    o, lse = device.empty(q.shape, q.dtype), device.empty((batch, heads, queries))
    parts, part_lse = o, lse
    if splits > 1:
        parts, part_lse = device.empty((splits, *q.shape)), device.empty((splits, *lse.shape))
    numbers = [batch, queries, keys, heads, kv_heads, splits, dies(device), window, float(scale)]
    device.launch(
        "attention_forward", f"attention_forward_{mode}_{width}",
        [q, k, v, doc_start, cache_len, parts, part_lse, *numbers],
        (heads * batch, splits * blocks, 1), threads=threads,
        work=2.0 * q.size * keys,  # a causal half of 2 products' 2 FLOP
    )  # fmt: skip
    if splits > 1:
        device.launch(
            "attention_combine", f"attention_combine_{kind}",
            [parts, part_lse, o, lse, lse.size, queries, heads, width, splits], device.groups(o.size // 4, 256),
            work=parts.nbytes + o.nbytes,
        )  # fmt: skip
    return narrowed(device, o, narrow), lse


def block_of(wave: int, width: int) -> tuple[int, int]:
    """Queries and work-items of a work-group of attention_forward.hip."""
    if wave == 64:
        return (128 if width > 128 else 384), 512
    return (64 if width > 128 else 128), 256


def _shares(device: Runtime, groups: int, keys: int) -> int:
    """Number of shares of the keys: enough for all compute units, each of at least _MIN_TILES tiles."""
    return max(1, min(device.compute_units // max(1, groups), keys // (_TILE_KEYS * _MIN_TILES), _MAX_SPLITS))


def _short_decoding(q: Array, k: Array) -> bool:
    """True where there is one query and few keys: then the plain kernel is as fast, and rounds no probabilities."""
    return q.shape[1] == 1 and k.shape[1] <= _DECODING_KEYS
