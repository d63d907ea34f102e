"""Self-test cases of the products: gemm, the NF4 product and its gradient, NF4 quantisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Array, Device


def cases(dtype: np.dtype) -> list[Case]:
    return _gemm_cases(dtype) + _nf4_cases(dtype) + _quantize_cases(dtype)


def matrix_cases() -> list[Case]:
    """Float16 products in every form that matrix units serve, on each of their tiles. Beside `cases`, for devices that
    have them: sides of at least 64, rows that start at multiples of 8 elements, with and without a rest of K."""
    found: list[Case] = []
    for tile in ("medium", "large"):
        forms = [(False, False), (False, True), (True, False), (True, True)]
        plain = [_gemm("plain", 264, 136, k, F16, trans_a=ta, trans_b=tb) for ta, tb in forms for k in (136, 256)]
        found += [_on_tile(case, tile) for case in plain + _matrix_epilogues() + _matrix_nf4()]
    found.append(_on_tile(_gemm("split", 72, 136, 4104, F16, trans_b=True, dtype=F32), ""))
    return found


def _matrix_epilogues() -> list[Case]:
    return [
        _gemm("long inner", 72, 136, 4104, F16, trans_b=True, dtype=F32),
        _gemm("epilogue", 200, 136, 96, F16, trans_b=True, alpha=0.37, bias=True, residual=F32, rank=20, dtype=F32),
        _gemm("lowrank", 200, 136, 72, F16, rank=40, residual=F16),
        _gemm("accumulate", 136, 264, 72, F16, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        _gemm("batched", 72, 136, 104, F16, batch=3, trans_b=True),
        _gemm("bfloat16", 72, 264, 104, F16, BF16, trans_b=True, dtype=F32),
        _gemm("bfloat16", 72, 264, 104, F16, BF16),
    ]


def _matrix_nf4() -> list[Case]:
    return [
        _nf4(name, m, n, k, F16, backward=backward, **options)
        for backward in (False, True)
        for name, m, n, k, options in (
            ("plain", 136, 264, 128, {}),
            ("lowrank 16", 264, 136, 192, {"rank": 16, "double": True}),
            ("rest of K", 72, 136, 264, {"double": True}),
        )
    ]


def _on_tile(case: Case, tile: str) -> Case:
    """The case with every product on the tile of this name, where the device has it."""

    def call(device: Device, x: Inputs) -> Outputs:
        before = getattr(device, "matrix_tile", "")
        device.matrix_tile = tile  # type: ignore[attr-defined]
        try:
            return case.call(device, x)
        finally:
            device.matrix_tile = before  # type: ignore[attr-defined]

    # The units cut off what a sum of 16 products has below the last place, where others round: an error of one sign.
    inner = int(case.shape.split("x")[1 if case.direction == "backward" else 2])
    return replace(case, name=f"{case.name}/{tile or 'any'} tile", call=call, ulps=case.ulps + inner / 32)


def _gemm(
    variant: str,
    m: int,
    n: int,
    k: int,
    a_dtype: Any,
    b_dtype: Any = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    batch: int = 0,
    alpha: float = 1.0,
    bias: bool = False,
    residual: Any = None,
    rank: int = 0,
    accumulate: Any = None,
    dtype: Any = None,
) -> Case:
    """`residual` and `accumulate` name the dtype of that argument."""
    b_dtype = a_dtype if b_dtype is None else b_dtype
    lead = (batch,) if batch else ()

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {
            "a": normal(rng, (*lead, k, m) if trans_a else (*lead, m, k), a_dtype),
            "b": normal(rng, (*lead, n, k) if trans_b else (*lead, k, n), b_dtype),
        }
        if bias:
            inputs["bias"] = normal(rng, (n,))
        if residual is not None:
            inputs["residual"] = normal(rng, (m, n), residual)
        if rank:
            inputs["u"] = normal(rng, (m, rank))
            inputs["v"] = normal(rng, (n, rank) if trans_b else (rank, n))
        if accumulate is not None:
            inputs["out"] = normal(rng, (*lead, m, n), accumulate)
        return inputs

    def call(device: Device, x: Inputs) -> Outputs:
        y = device.gemm(
            x["a"],
            x["b"],
            trans_a=trans_a,
            trans_b=trans_b,
            alpha=alpha,
            bias=x.get("bias"),
            residual=x.get("residual"),
            lowrank=(x["u"], x["v"]) if rank else None,
            out=x.get("out"),
            accumulate=accumulate is not None,
            dtype=dtype,
        )
        return {"y": y}

    form = ("t" if trans_a else "n") + ("t" if trans_b else "n")
    shape = f"{'x'.join(map(str, (*lead, m, n, k)))}"
    dtypes = dtype_name(a_dtype) + ("" if b_dtype == a_dtype else f"*{dtype_name(b_dtype)}")
    return Case(f"gemm_{form}/{variant}/{shape}/{dtypes}", "gemm", "forward", dtypes, shape, build, call)


def _gemm_cases(t: np.dtype) -> list[Case]:
    found = [
        _gemm("plain", m, n, k, t, trans_a=ta, trans_b=tb)
        for ta, tb in ((False, False), (False, True), (True, False), (True, True))
        for m, n, k in ((41, 123, 67), (128, 128, 64))
    ]
    found += [
        _gemm("batched", 17, 29, 31, t, batch=3),
        _gemm("batched", 17, 29, 31, t, batch=3, trans_b=True),
        _gemm("batched", 17, 29, 31, t, batch=3, trans_a=True),
        _gemm("row", 1, 123, 67, t, trans_b=True),
        _gemm("row", 1, 256, 128, t, trans_b=True, bias=True),
        _gemm("few rows", 3, 130, 72, t, trans_b=True),
        _gemm("column", 41, 1, 67, t, trans_b=True),
        _gemm("inner 1", 41, 37, 1, t),
        _gemm("long inner", 9, 35, 1003, t, trans_b=True),
        _gemm("tiles", 259, 133, 130, t, trans_b=True),
        _gemm("alpha", 41, 37, 67, t, trans_b=True, alpha=0.37),
        _gemm("bias", 41, 37, 67, t, trans_b=True, bias=True),
        _gemm("residual", 41, 37, 67, t, trans_b=True, residual=t),
        _gemm("lowrank", 41, 37, 67, t, trans_b=True, rank=5),
        _gemm("lowrank", 41, 37, 67, t, rank=16),
        _gemm("epilogue", 70, 131, 72, t, trans_b=True, alpha=0.37, bias=True, residual=F32, rank=8, dtype=F32),
        _gemm("accumulate", 37, 41, 67, t, trans_a=True, accumulate=F32, dtype=F32),
        _gemm("accumulate alpha", 16, 576, 129, t, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        _gemm("bfloat16", 41, 123, 67, t, BF16, trans_b=True),
        _gemm("bfloat16", 41, 122, 68, t, BF16),
        _gemm("bfloat16 row", 1, 123, 68, t, BF16, trans_b=True, dtype=F32),
    ]
    if t == F16:
        found += [
            _gemm("mixed", 41, 37, 67, F16, F32, trans_b=True, dtype=F32),
            _gemm("mixed", 41, 37, 67, F32, F16, dtype=F16),
            _gemm("mixed", 41, 37, 67, F32, F16, trans_a=True, dtype=F32),
            _gemm("mixed, default dtype", 41, 37, 67, F16, F32, trans_b=True),
            _gemm("mixed, default dtype", 41, 37, 67, F32, F16),
            _gemm("mixed, default dtype", 17, 29, 31, F16, F32, batch=3),
            _gemm("mixed, default dtype", 9, 35, 1003, F16, F32, trans_b=True, rank=5),
            _gemm("mixed, default dtype", 41, 37, 67, F16, BF16, trans_b=True),
            _gemm("accumulate, default dtype", 37, 41, 67, F16, F32, trans_a=True, accumulate=F32),
            _gemm("lora u", 41, 8, 67, F16, F32, trans_b=True, alpha=2.0, dtype=F32),
            _gemm("residual float32", 41, 37, 67, F16, trans_b=True, residual=F32, dtype=F32),
        ]
    return found


def _nf4(
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
    def build(rng: np.random.Generator) -> Inputs:
        weight = ReferenceDevice().nf4_quantize(normal(rng, (n, k), F32, 0.1), block_size, double=double)
        weight = replace(weight, value_dtype=value_dtype)
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
            return {"dx": device.linear_nf4_backward(x["x"], x["weight"], lowrank=lowrank, dtype=dtype)}
        more = {"bias": x.get("bias"), "residual": x.get("residual")}
        return {"y": device.linear_nf4(x["x"], x["weight"], lowrank=lowrank, dtype=dtype, **more)}

    op = "linear_nf4_backward" if backward else "linear_nf4"
    shape = f"{m}x{n}x{k}"
    name = f"{op}/{variant}{' double' if double else ''}/{shape}/{dtype_name(x_dtype)}"
    direction = "backward" if backward else "forward"
    return Case(name, op, direction, dtype_name(x_dtype), shape, build, call)


def _nf4_cases(t: np.dtype) -> list[Case]:
    found = []
    for backward in (False, True):
        for double in (False, True):
            options: dict[str, Any] = {"backward": backward, "double": double}
            found += [
                _nf4("plain", 41, 160, 128, t, **options),
                _nf4("blocks across rows", 37, 123, 72, t, **options),
                _nf4("odd", 9, 35, 67, t, **options),
                _nf4("row", 1, 130, 192, t, **options),
                _nf4("tiles", 131, 192, 136, t, **options),
            ]
        found += [
            _nf4("block 128", 41, 37, 200, t, backward=backward, block_size=128),
            _nf4("block 4096", 5, 130, 96, t, backward=backward, block_size=4096),
            _nf4("lowrank", 70, 72, 130, t, backward=backward, rank=8),
            _nf4("lowrank 5", 41, 37, 64, t, backward=backward, rank=5, double=True, dtype=F32),
            _nf4("row lowrank", 1, 72, 128, t, backward=backward, rank=16, double=True),
        ]
    found += [
        _nf4("bias", 41, 37, 64, t, bias=True),
        _nf4("residual", 41, 37, 64, t, residual=t),
        _nf4("epilogue", 70, 131, 72, t, bias=True, residual=F32, rank=8, dtype=F32, double=True),
        _nf4("row epilogue", 1, 131, 72, t, bias=True, residual=F32, rank=8, dtype=F32),
    ]
    if t == F16:
        found += [
            _nf4("mixed, default dtype", 41, 37, 64, F16, residual=F32, bias=True, rank=5),
            _nf4("mixed, default dtype", 41, 37, 64, F16, backward=True, rank=5),
            _nf4("mixed, default dtype", 41, 37, 67, F32, residual=F16),
            _nf4("float16 to float32", 41, 37, 64, F16, dtype=F32),
            _nf4("float16 to float32", 41, 37, 64, F16, dtype=F32, backward=True),
            _nf4("float32 to float16", 41, 37, 64, F32, dtype=F16, backward=True),
        ]
    return found + _rounded_cases(t)


def _rounded_cases(t: np.dtype) -> list[Case]:
    """Weights whose restored values are rounded to 16 bits, as those of bitsandbytes' 16-bit models."""
    if t != F32:
        value = dtype_name(t)
        return [_nf4(f"of {value}", 41, 160, 128, t, backward=b, value_dtype=value) for b in (False, True)]
    found = []
    for value in ("float16", "bfloat16"):
        found += [
            _nf4(f"of {value}", 41, 160, 128, t, double=True, value_dtype=value),
            _nf4(f"of {value}", 41, 160, 128, t, backward=True, value_dtype=value),
            _nf4(f"odd of {value}", 9, 35, 67, t, value_dtype=value),
            _nf4(f"row of {value}", 1, 130, 192, t, value_dtype=value),
        ]
    return found


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
        found.append(Case(label, "nf4_quantize", "forward", name, shape, build, call, finish=finish))
    return found


def quantized(device: Device, w: Array, block_size: int, double: bool) -> Outputs:
    """What `finish` "nf4" or "nf4 double" takes."""
    plain = device.nf4_quantize(w, block_size)
    if not double:
        return {"absmax": plain.absmax, "restored": device.nf4_dequantize(plain, F32), "w": w}
    weight = device.nf4_quantize(w, block_size, double=True)
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
    rows: int, columns: int, dtype: Any, double: bool, value_dtype: str = "float32", scale: float = 0.02
) -> Case:
    """dtype None: left out of the call."""

    def build(rng: np.random.Generator) -> Inputs:
        weight = ReferenceDevice().nf4_quantize(normal(rng, (rows, columns), F32, scale), double=double)
        return {"weight": replace(weight, value_dtype=value_dtype)}

    def call(device: Device, x: Inputs) -> Outputs:
        return {"w": device.nf4_dequantize(x["weight"], *([] if dtype is None else [dtype]))}

    shape, name = f"{rows}x{columns}", "default dtype" if dtype is None else dtype_name(dtype)
    variant = "double" if double else "plain"
    if value_dtype != "float32":
        variant += f" of {value_dtype}" + (" subnormal" if scale < 1e-4 else "")
    return Case(f"nf4_dequantize/{variant}/{shape}/{name}", "nf4_dequantize", "forward", name, shape, build, call)


def _quantize_cases(t: np.dtype) -> list[Case]:
    found = _quantize(160, 136, t) + _quantize(35, 67, t) + _quantize(37, 200, t, 128)
    if t == F32:
        found += _quantize(123, 72, BF16)
        found += [_dequantize(35, 67, None, double) for double in (False, True)]
    found += [_dequantize(r, c, t, double) for r, c in ((160, 128), (35, 67)) for double in (False, True)]
    found += [_dequantize(160, 128, t, True, value) for value in ("float16", "bfloat16")]
    found.append(_dequantize(35, 67, t, False, "float16", 1e-6))
    return found
