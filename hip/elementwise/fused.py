"""Elementwise expressions of broadcasting operands, with a sum or a maximum, by an interpreter. Kernels: fused.hip."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError, TooLarge
from wgrad.device.expression import MOST_ARRAYS, SOURCES, Program, View, row_major
from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, implements
from wgrad.hip.runtime.runtime import Runtime

_SLOTS = 32  # for intermediate values, as in fused.hip
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3, "uint32": 4}
_NAMES = (
    "load", "scalar", "index", "old", "add", "sub", "mul", "div", "pow", "maximum", "minimum", "lt", "le", "gt",
    "ge", "eq", "ne", "where", "neg", "exp", "expm1", "log", "sqrt", "abs", "sign", "sin", "cos", "relu", "tanh",
    "sigmoid", "softplus", "silu", "silu_slope", "gelu", "gelu_slope", "gelu_exact",
    "gelu_exact_slope",
)  # fmt: skip
_FUNCTIONS = {name: number for number, name in enumerate(_NAMES)}
_KINDS = {"sum": 1, "max": 2}
_LEAST_ROWS, _ENOUGH_WAVES = 256, 4096  # of a chunk of a reduction; waves beyond which it is not divided
_CODES = 4096  # programs whose code is kept


@implements("fused")
def fused(
    device: Runtime,
    program: Program,
    arrays: tuple[Array, ...],
    views: tuple[View, ...],
    scalars: tuple[float, ...],
    shape: tuple[int, ...],
    reduce: str,
    axes: tuple[int, ...],
    out: Array | None,
    place: View | None,
    accumulate: bool,
    dtype: np.dtype,
) -> Array:
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    kept_shape = tuple(shape[axis] for axis in kept)
    result = device.empty(kept_shape, dtype) if out is None else out
    strides, offset = place or (row_major(kept_shape), 0)
    order, n, rows = [*kept, *axes], math.prod(kept_shape), math.prod(shape[axis] for axis in axes)
    if max(n * rows, result.size, *(array.size for array in arrays), 0) >= 1 << 32:
        raise TooLarge(f"fused: {list(shape)} has too many elements for this device; use a smaller batch")
    arrays = tuple(_apart(device, array, result) for array in arrays)
    seen = [tuple(of[axis] for axis in order) for of, _ in views]
    seen.append((*strides, *(0 for _ in axes)))
    offsets = [*(at for _, at in views), offset]
    code = _code(program, scalars, [shape[axis] for axis in order], seen, offsets, order)
    waves = -(-_ENOUGH_WAVES // max(n, 1))
    step = max(-(-rows // waves), min(rows, _LEAST_ROWS)) if reduce else rows
    chunks = -(-rows // step)
    target = result if chunks == 1 else device.empty((chunks, *kept_shape))
    types = [*(_TYPES[array.dtype.name] for array in arrays), *[0] * (MOST_ARRAYS - len(arrays))]
    types.append(_TYPES[target.dtype.name])
    operands: list[Any] = [*arrays, *[None] * (MOST_ARRAYS - len(arrays)), target, _uploaded(device, code)]
    operands += [len(program), len(scalars), len(shape), len(arrays), sum(t << 4 * i for i, t in enumerate(types))]
    operands += [int(accumulate and chunks == 1), n]
    work = float(n * rows * len(program))
    if not reduce:
        device.launch("fused", "fused", operands, device.groups(n, GROUP), work=work)
        return result
    more = [rows, step, len(kept), _KINDS[reduce]]
    groups = device.groups(n * chunks, GROUP // device.wave)
    device.launch("fused", "fused_reduce", [*operands, *more], groups, work=work)
    if chunks > 1:
        whole = (("load", 0),), (target,), ((row_major(target.shape), 0),), (), target.shape
        fused(device, *whole, reduce, (0,), result, place, accumulate, result.dtype)
    return result


def _apart(device: Runtime, array: Array, result: Array) -> Array:
    """Return a copy of an operand that overlaps the result, whose elements may be written before they are read."""
    if array.lease is not result.lease:
        return array
    made = device.empty(array.shape, array.dtype)
    device.copy(array, made)
    return made


def _code(
    program: Program,
    scalars: Sequence[float],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    offsets: Sequence[int],
    order: Sequence[int],
) -> bytes:
    """Encode the program as the words that fused.hip reads."""
    last = {i: number for number, (name, *of) in enumerate(program) if name not in SOURCES for i in of}
    free, slots, words = list(range(_SLOTS))[::-1], dict[int, int](), list[int]()
    for number, (name, *of) in enumerate(program):
        if name not in _FUNCTIONS:
            raise DeviceError(f"fused: hip has no function {name!r}; use --device wgpu or cpu, or auto")
        read = [order.index(of[0])] if name == "index" else of if name in SOURCES else [slots[i] for i in of]
        if name not in SOURCES:
            free += [slots.pop(i) for i in dict.fromkeys(of) if last[i] == number]
        if not free:
            raise DeviceError(f"fused: an expression needs more than {_SLOTS} values at once; split it")
        slot = free.pop()
        if number in last:
            slots[number] = slot
        else:
            free.append(slot)  # nobody reads it, or it is the result
        words += [_FUNCTIONS[name] | slot << 8, sum(i << 8 * place for place, i in enumerate(read))]
    with np.errstate(over="ignore"):  # beyond float32 is inf
        words += np.asarray(scalars, np.float32).view(np.uint32).tolist()
    words += [*sizes, *(stride for of in strides for stride in of), *offsets]
    return struct.pack(f"{len(words)}I", *words)


def _uploaded(device: Runtime, code: bytes) -> Array:
    """Upload the code, at every launch and every replay.

    Memory allocated during a recording may be overwritten by other recordings, so the code is not kept on the device.
    """
    kept = device.once(_codes)
    host = kept.get(code)
    if host is None:
        if len(kept) >= _CODES:
            kept.clear()
        words = np.frombuffer(code, np.uint32)
        host = kept[code] = device.empty_host(words.shape, np.uint32)
        device.write(host, words)
    made = device.empty(host.shape, np.uint32)
    device.transfer(host, made)
    return made


def _codes(_: Runtime) -> dict[bytes, Array]:
    """Return the cache of codes in main memory. It is cleared when full; recordings keep the codes that they use."""
    return {}
