"""Self-test cases of quantizing and dequantizing weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.gguf_quantize import ROUNDED


def _quantize(rows: int, columns: int, dtype: Any, block_size: int = 64) -> list[Case]:
    def build(rng: np.random.Generator) -> Inputs:
        w = normal(rng, (rows, columns), dtype, 0.02)
        w.reshape(-1)[: block_size // 2] = 0
        return {"w": w}

    shape, name = f"{rows}x{columns}", dtype_name(dtype)
    found = []
    for variant, double in (("block", False), ("double block", True)):

        def call(device: Device, x: Inputs, double: bool = double) -> Outputs:
            return quantized(device, x["w"], block_size, double)

        label, finish = f"nf4_quantize/{variant} {block_size}/{shape}/{name}", "nf4 double" if double else "nf4"
        found.append(Case(label, "quantize", "forward", name, shape, build, call, finish=finish))

    def apart(device: Device, x: Inputs) -> Outputs:
        return quantized(device, x["w"], block_size, True, apart=True)

    if block_size == 64:
        label = f"nf4_quantize_scales/block {block_size}/{shape}/{name}"
        found.append(Case(label, "quantize_scales", "forward", name, shape, build, apart, finish="nf4 double"))
    return found


def quantized(device: Device, w: Array, block_size: int, double: bool, apart: bool = False) -> Outputs:
    """Quantize and return the outputs for `finish` "nf4" or "nf4 double". apart: quantize scales separately."""
    plain = device.quantize(w, block_size)
    if not double:
        return {"absmax": plain.absmax, "restored": device.dequantize(plain, F32), "w": w}
    weight = device.quantize_scales(plain) if apart else device.quantize(w, block_size, double=True)
    return {
        "absmax": plain.absmax,
        "plain_packed": plain.packed,
        "packed": weight.packed,
        "codes": weight.absmax,
        "nested_absmax": weight.nested_absmax,
        "code": weight.nested_code,
        "offset": weight.nested_offset,
    }


def _dequantize(
    rows: int,
    columns: int,
    dtype: Any,
    double: bool = False,
    value_dtype: str = "float32",
    scale: float = 0.02,
    format: str = "nf4",
) -> Case:
    """Return a case of dequantizing. dtype: of the result; None: the call names none."""
    columns = -(-columns // formats()[format].block) * formats()[format].block

    def build(rng: np.random.Generator) -> Inputs:
        weight = formats()[format].quantize(normal(rng, (rows, columns), F32, scale), double=double)
        if value_dtype != "float32":
            weight = replace(weight, value_dtype=value_dtype)  # type: ignore[type-var]
        return {"weight": weight}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"w": device.dequantize(x["weight"], *([] if dtype is None else [dtype]))}

    shape, name = f"{rows}x{columns}", "default dtype" if dtype is None else dtype_name(dtype)
    variant = "double" if double else "plain"
    if value_dtype != "float32":
        variant += f" of {value_dtype}" + (" subnormal" if scale < 1e-4 else "")
    elif scale < 0.02:
        variant += " small"
    return Case(f"{format}_dequantize/{variant}/{shape}/{name}", "dequantize", "forward", name, shape, build, call)


def _round(format: str, rows: int, columns: int) -> Case:
    """Return a case of `round_weight`, which must match to the bit.

    Groups are zeros, tiny, far apart, opposite or of one sign; the number of blocks is odd.
    """

    def build(rng: np.random.Generator) -> Inputs:
        w = normal(rng, (rows, columns), F32, 0.02)
        w *= np.exp2(rng.integers(-6, 3, (rows, 1))).astype(F32)
        w[0, :32], w[1], w[4] = 0, 1e-20 * w[1], np.abs(w[4]) + 0.1
        w[2, [5, 9]], w[3, [4, 6]] = (40, -40), (-40, 40)  # of equal magnitudes, the first counts
        w[1, 0] = 1e-14  # large enough for Q6_K to try scales, which are too small
        w[5:15] = -rng.random((10, columns))  # of some, Q4_K takes the last scale that it tries
        kind = formats()[format]
        return {"w": w, "out": kind.quantize(np.zeros(w.shape, F32))}

    def call(device: Device, x: Inputs) -> Outputs:
        made: Outputs = device.round_weight(x["w"], x["out"]).arrays()
        return made

    shape = f"{rows}x{columns}"
    return Case(f"round_weight/{format}/{shape}/float32", "round_weight", "forward", "float32", shape, build, call)


def cases(t: np.dtype) -> list[Case]:
    found = _quantize(160, 136, t) + _quantize(35, 67, t) + _quantize(37, 200, t, 128)
    if t == F32:
        found += _quantize(123, 72, BF16)
        found += [_dequantize(35, 67, None, double) for double in (False, True)]
        found += [_round(format, 27, 3 * formats()[format].block) for format in ROUNDED]
    for format in formats():
        found += [_dequantize(160, 128, t, format=format), _dequantize(37, 96, t, scale=1e-4, format=format)]
    found += [_dequantize(160, 128, t, True), _dequantize(35, 67, t), _dequantize(35, 67, t, True)]
    found += [_dequantize(160, 128, t, True, value) for value in ("float16", "bfloat16")]
    found.append(_dequantize(35, 67, t, False, "float16", 1e-6))
    return found
