"""Self-test cases of the GEMM with a frozen weight, and of its gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.nf4 import NF4Array


def cases(dtype: np.dtype) -> list[Case]:
    return [case for format in formats() for case in _cases(format, dtype)] + _nf4_cases(dtype) + stacked_cases(dtype)


# TQ2_0 has levels -1, 0 and 1 and one scale for 256 elements. Rounded to bfloat16, all weights of a row are off by the
# same factor, up to 2^-9: these errors do not average out over the sum, as those of other formats do.
_ONE_SCALE_ULPS = 2.0**14


def frozen_case(
    format: str,
    variant: str,
    m: int,
    n: int,
    k: int,
    x_dtype: Any,
    *,
    backward: bool = False,
    double: bool = False,
    block_size: int = 64,
    bias: bool = False,
    residual: Any = None,
    rank: int = 0,
    dtype: Any = None,
    value_dtype: str = "float32",
) -> Case:
    k = -(-k // formats()[format].block) * formats()[format].block

    def build(rng: np.random.Generator) -> Inputs:
        weight = formats()[format].quantize(normal(rng, (n, k), F32, 0.1), block_size, double)
        if value_dtype != "float32":
            weight = replace(weight, value_dtype=value_dtype)  # type: ignore[type-var]
        inputs: Inputs = {"x": normal(rng, (m, n if backward else k), x_dtype), "weight": weight}
        if bias:
            inputs["bias"] = normal(rng, (n,))
        if residual is not None:
            inputs["residual"] = normal(rng, (m, n), residual)
        if rank:
            inputs["u"] = normal(rng, (m, rank))
            inputs["v"] = normal(rng, (rank, k) if backward else (n, rank))
        return inputs

    def call(device: Device, x: Inputs) -> Outputs:
        lowrank = (x["u"], x["v"]) if rank else None
        if backward:
            return {"dx": device.linear_quantized_backward(x["x"], x["weight"], lowrank=lowrank, dtype=dtype)}
        more = {"bias": x.get("bias"), "residual": x.get("residual")}
        return {"y": device.linear_quantized(x["x"], x["weight"], lowrank=lowrank, dtype=dtype, **more)}

    suffix = "_backward" if backward else ""
    op, label = "linear_quantized" + suffix, f"linear_{format}{suffix}"
    shape = f"{m}x{n}x{k}"
    name = f"{label}/{variant}{' double' if double else ''}/{shape}/{dtype_name(x_dtype)}"
    direction = "backward" if backward else "forward"
    ulps = _ONE_SCALE_ULPS if format == "tq2_0" and x_dtype == BF16 else Case.ulps
    return Case(name, op, direction, dtype_name(x_dtype), shape, build, call, ulps)


_WITH_EPILOGUES = ("nf4", "q8_0")
nf4_case = partial(frozen_case, "nf4")


def _cases(format: str, t: np.dtype) -> list[Case]:
    """Return the cases of a format. Rows are rounded up to whole blocks.

    Epilogues do not depend on the format, so only two formats have cases of them.
    """
    case = partial(frozen_case, format)
    found = [case("plain", 41, 160, 128, t, backward=backward) for backward in (False, True)]
    found.append(case("row", 1, 130, 192, t))
    if format not in _WITH_EPILOGUES:
        return found
    for backward in (False, True):
        found.append(case("tiles lowrank", 131, 200, 160, t, backward=backward, rank=8))
    found.append(case("row", 1, 130, 192, t, backward=True))
    found += [
        case("bias", 41, 37, 64, t, bias=True),
        case("residual", 41, 37, 64, t, residual=t),
        case("row epilogue", 1, 131, 96, t, bias=True, residual=F32, rank=8, dtype=F32),
        case("rows epilogue", 5, 131, 96, t, bias=True, residual=F32, rank=8, dtype=F32),
        case("rows", 8, 70, 2080, t),
        case("sixteen rows", 16, 130, 160, t, rank=5),
    ]
    if t == F16:
        found += [
            case("mixed, default dtype", 41, 37, 64, F16, residual=F32, bias=True, rank=5),
            case("mixed, default dtype", 41, 37, 64, F16, backward=True, rank=5),
            case("float16 to float32", 41, 37, 64, F16, dtype=F32),
            case("float16 to float32", 41, 37, 64, F16, dtype=F32, backward=True),
            case("float32 to float16", 41, 37, 64, F32, dtype=F16, backward=True),
        ]
    return found


def _nf4_cases(t: np.dtype) -> list[Case]:
    """Return cases of features that only NF4 has: nested scales, rows and blocks of any length."""
    found = []
    for backward in (False, True):
        for double in (False, True):
            options: dict[str, Any] = {"backward": backward, "double": double}
            found += [
                nf4_case("blocks across rows", 37, 123, 72, t, **options),
                nf4_case("odd", 9, 35, 67, t, **options),
                nf4_case("tiles", 131, 192, 136, t, **options),
            ]
        found += [
            nf4_case("plain", 41, 160, 128, t, backward=backward, double=True),
            nf4_case("row", 1, 130, 192, t, backward=backward, double=True),
            nf4_case("block 128", 41, 37, 200, t, backward=backward, block_size=128),
            nf4_case("block 4096", 5, 130, 96, t, backward=backward, block_size=4096),
            nf4_case("lowrank", 70, 72, 130, t, backward=backward, rank=8),
            nf4_case("lowrank 5", 41, 37, 64, t, backward=backward, rank=5, double=True, dtype=F32),
            nf4_case("row lowrank", 1, 72, 128, t, backward=backward, rank=16, double=True),
            nf4_case("whole tiles", 128, 128, 128, t, backward=backward, double=True),
            nf4_case("whole tiles lowrank", 128, 64, 64, t, backward=backward, rank=16),
        ]
    found += [
        nf4_case("epilogue", 70, 131, 72, t, bias=True, residual=F32, rank=8, dtype=F32, double=True),
        nf4_case("row epilogue", 1, 131, 72, t, bias=True, residual=F32, rank=8, dtype=F32),
    ]
    if t == F16:
        found.append(nf4_case("mixed, default dtype", 41, 37, 67, F32, residual=F16))
    return found + _rounded_cases(t)


def _rounded_cases(t: np.dtype) -> list[Case]:
    """Return cases of weights that are rounded to 16 bits when decoded, as in bitsandbytes' 16-bit models."""
    if t != F32:
        value = dtype_name(t)
        return [nf4_case(f"of {value}", 41, 160, 128, t, backward=b, value_dtype=value) for b in (False, True)]
    found = []
    for value in ("float16", "bfloat16"):
        found += [
            nf4_case(f"of {value}", 41, 160, 128, t, double=True, value_dtype=value),
            nf4_case(f"of {value}", 41, 160, 128, t, backward=True, value_dtype=value),
            nf4_case(f"odd of {value}", 9, 35, 67, t, value_dtype=value),
            nf4_case(f"row of {value}", 1, 130, 192, t, value_dtype=value),
        ]
    return found


def stacked_cases(t: np.dtype) -> list[Case]:
    """Return cases of stacked weights with one input: scales with gaps, offsets and LoRA terms of each part."""
    three, two = (192, 64, 128), (128, 64)
    return [
        _stacked_case("stack", 37, two, 72, t, double=False),
        _stacked_case("stack lowrank", 131, three, 136, t, double=True, rank=6, bias=True),
        _stacked_case("stack few rows", 5, three, 136, t, double=True, rank=6, bias=True),
        _stacked_case("stack", 37, two, 72, t, double=False, backward=True),
        _stacked_case("stack lowrank", 131, three, 136, t, double=True, rank=18, backward=True),
    ]


def _stacked_case(variant: str, m: int, parts: tuple[int, ...], k: int, x_dtype: Any, **options: Any) -> Case:
    """Return a case of a stack. options: those of `frozen_case`; in the backward, rank is that of all parts."""
    n, rank, backward = sum(parts), options.get("rank", 0), options.get("backward", False)
    plain = nf4_case(f"{variant} of {len(parts)}", m, n, k, x_dtype, **options)

    def build(rng: np.random.Generator) -> Inputs:
        inputs = plain.build(rng)
        scaled = [normal(rng, (rows, k), F32, 0.1 * (i + 1)) for i, rows in enumerate(parts)]
        quantized = [NF4Array.quantize(w, 64, options["double"]) for w in scaled]
        code = quantized[0].nested_code
        stack = NF4Array.stack([replace(w, nested_code=code) for w in quantized], _Host)
        assert stack is not None
        inputs["weight"] = stack
        if rank and not backward:
            inputs["u"] = normal(rng, (m, len(parts) * rank))
        return inputs

    return replace(plain, build=build)


class _Host:
    """The calls of a device that `NF4Array.stack` makes, in NumPy."""

    zeros = staticmethod(np.zeros)

    @staticmethod
    def view(array: np.ndarray, shape: Any, offset: int) -> np.ndarray:
        return array[offset : offset + int(np.prod(shape))].reshape(shape)

    @staticmethod
    def copy(src: np.ndarray, out: np.ndarray) -> None:
        out[...] = src
