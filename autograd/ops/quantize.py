"""Quantizing weights into a format of few bits, and dequantizing them (device/formats)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.decoded_weights import forget_decoded
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.device.contract import Array, DType
from wgrad.device.formats.frozen_weight import AGAIN, FrozenWeight, formats
from wgrad.device.formats.gguf_quantize import ROUNDED, rounded
from wgrad.device.formats.nf4 import NF4Array


def frozen_weight(args: Args, name: str, w: FrozenWeight) -> None:
    """Check the arrays of a frozen weight by the rules, shapes and dtypes of its format."""
    for holds, message in w.rules():
        args.rule(holds, f"{name}.{message}; {AGAIN}")
    arrays = w.arrays()
    for part, size, kind in w.layout():
        args.array(f"{name}.{part}", arrays[part], str(size), kind, AGAIN)


def frozen_compute_dtype(w: FrozenWeight, *others: np.ndarray | None) -> np.dtype:
    return compute_dtype(*w.arrays().values(), *others)


@operator
def quantize(
    args: Args, w: Array, block_size: int = 64, *, double: bool = False, format: str = NF4Array.format
) -> None:
    """w [out, in] float32, float16 or bfloat16 -> a weight of the format (device/formats): NF4Array, value-compatible
    with bitsandbytes. double: its scales are quantized too."""
    args.array("w", w, "N K", "weight", "only matrices are quantized")
    args.rule(format in formats(), f"format must be one of {', '.join(formats())}, got {format!r}; nf4 is usual")
    for holds, message in formats()[format].quantize_rules(block_size, double):
        args.rule(holds, message)


@quantize.reference
def _(w: np.ndarray, block_size: int, double: bool, format: str) -> FrozenWeight:
    return formats()[format].quantize(up(w, compute_dtype(w)), block_size, double)


@operator
def quantize_scales(args: Args, w: FrozenWeight) -> None:
    """w, an NF4Array without double quantization -> the same with it; both share the codes."""
    plain = isinstance(w, NF4Array) and not w.nested and not w.parts
    args.rule(plain, "w must be an NF4Array without double quantization; pass what quantize returns without double")
    frozen_weight(args, "w", w)


@quantize_scales.reference
def _(w: NF4Array) -> FrozenWeight:
    return w.with_nested_scales()


@operator
def dequantize(args: Args, w: FrozenWeight, dtype: DType = np.float32) -> dict[str, Any]:
    """-> [out, in]."""
    frozen_weight(args, "w", w)
    return {"dtype": args.dtype("dtype", dtype, np.float32)}


@dequantize.reference
def _(w: FrozenWeight, dtype: np.dtype) -> np.ndarray:
    compute = frozen_compute_dtype(w)
    return finish(w.rows(0, w.shape[0], compute), dtype, compute)


@operator
def round_weight(args: Args, w: Array, out: FrozenWeight) -> None:
    """Overwrite out, a weight in a format of GGUF, with w [out, in] float32 rounded as llama-quantize does."""
    args.array("w", w, "N K", "f32", "cast it first")
    name = getattr(out, "format", type(out).__name__)
    args.rule(name in ROUNDED, f"out must be a weight in one of {', '.join(ROUNDED)}, got {name}; make one of those")
    frozen_weight(args, "out", out)
    args.axes("out", out, "N K", "pass a weight of the same shape")


@round_weight.reference
def _(w: np.ndarray, out: FrozenWeight) -> FrozenWeight:
    for name, new in rounded(type(out), w).arrays().items():
        array: Any = out.arrays()[name]
        forget_decoded(array)
        array[...] = new
    return out
