"""Devices that check what no tape checks: the operators without a gradient, which anyone may call on a device itself.

An operator with a gradient is called through its function on Tensors, which runs the schema. Quantising, the optimiser,
decoding and what overwrites an array have no such function in front of them: `select_device` hands out devices of a
class made here, and functional.py, which knows more (the host's own copy of cache_len), checks by itself and calls
`unchecked`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from wgrad.autograd import schema, schema_state
from wgrad.device.contract import Array, Device, DType, NF4Array


def as_nf4_array(w: Any) -> NF4Array:
    """What a device's nf4_quantize returned, as an NF4Array: the rooms below cannot import that class, and return an
    object with the same fields."""
    return w if isinstance(w, NF4Array) else NF4Array(**{f.name: getattr(w, f.name) for f in fields(NF4Array)})


_Base: Any = object  # what `super()` is here: a device class


class CheckedOps(_Base):
    """In front of a device class: the schema, then the device's own operator."""

    def write(self, array: Array, host: np.ndarray) -> None:
        schema_state.write(array, host)
        super().write(array, host)

    def copy(self, src: Array, out: Array) -> None:
        schema_state.copy(src, out)
        super().copy(src, out)

    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Array:
        schema.nf4_quantize(self, w, block_size)
        return as_nf4_array(super().nf4_quantize(w, block_size, double=double))

    def nf4_dequantize(self, w: NF4Array, dtype: DType = np.float32) -> Array:
        return super().nf4_dequantize(w, schema.nf4_dequantize(self, w, dtype))

    def kv_append(self, cache: Array, new: Array, cache_len: Array) -> None:
        schema.kv_append(self, cache, new, cache_len, None, look=False)
        super().kv_append(cache, new, cache_len)

    def rope_append(
        self,
        k: Array,
        v: Array,
        cos: Array,
        sin: Array,
        positions: Array,
        keys: Array,
        values: Array,
        cache_len: Array,
    ) -> None:
        schema.rope_append(self, (k, v), (cos, sin, positions), (keys, values), cache_len, None, look=False)
        super().rope_append(k, v, cos, sin, positions, keys, values, cache_len)

    def grad_norm(self, g: Array) -> Array:
        schema_state.grad_norm(self, g)
        return super().grad_norm(g)

    def clip(
        self: Any, norm: Array, hyper: Array, state: Array, loss_scale: Array, *, beta1: float, beta2: float
    ) -> None:
        schema_state.clip(self, norm, hyper, state, loss_scale)
        super().clip(norm, hyper, state, loss_scale, beta1=beta1, beta2=beta2)

    def adamw(
        self,
        p: Array,
        g: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        hyper: Array,
        state: Array,
        *,
        decay_elements: int,
        **options: Any,
    ) -> None:
        arrays = {"p": p, "g": g, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "hyper": hyper, "state": state}
        schema_state.adamw(self, arrays, decay_elements)
        super().adamw(p, g, exp_avg, exp_avg_sq, hyper, state, decay_elements=decay_elements, **options)

    def sample(self, logits: Array, uniform: Array, *, temperature: float, top_k: int, top_p: float) -> Array:
        schema_state.sample(self, logits, uniform, temperature, top_k, top_p)
        return super().sample(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p)


@cache
def checked(kind: type) -> Any:
    """The device class `kind` with CheckedOps in front, under its own name."""
    return type(kind.__name__, (CheckedOps, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def unchecked(device: Device) -> Any:
    """The device's own operators, for a caller that has run the schema."""
    return super(CheckedOps, device) if isinstance(device, CheckedOps) else device  # type: ignore[misc]
