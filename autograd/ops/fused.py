"""Elementwise expressions with broadcasting in one launch, optionally reduced by a sum or a maximum over axes.

`autograd/lazy.py` makes the calls: it collects chains of operators on Tensors until their values are needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import FLOAT64, compute_dtype, up
from wgrad.device.contract import Array, DType
from wgrad.device.expression import (
    FUNCTIONS,
    MOST_ARRAYS,
    MOST_AXES,
    MOST_SCALARS,
    REDUCTIONS,
    SOURCES,
    Program,
    View,
    evaluate,
)

_STORED = {"float32", "float16", "bfloat16", "float64", "int32", "uint32"}


@operator
def fused(
    args: Args,
    program: Program,
    arrays: tuple[Array, ...],
    views: tuple[View, ...],
    scalars: tuple[float, ...],
    shape: tuple[int, ...],
    *,
    reduce: str = "",
    axes: tuple[int, ...] = (),
    out: Array | None = None,
    place: View | None = None,
    accumulate: bool = False,
    dtype: DType = np.float32,
) -> dict[str, Any]:
    """Evaluate the program (device/expression.py) at every index of `shape`, in float32.

    views[k]: strides and offset, in elements, by which array k (float, int32 or uint32) is read over `shape`; a stride
    of 0 repeats it. reduce: "sum" or "max" over `axes`, which the result lacks; "" for none. out: the array to write,
    instead of a new one of `dtype`; place: strides and offset in it, over the remaining axes. accumulate: add the
    result to the values in out. The instruction ("old",) reads the value in out; only without a reduction.
    """
    _counts(args, arrays, views, scalars, shape)
    for k, (array, view) in enumerate(zip(arrays, views)):
        _within(args, f"arrays[{k}]", array, view, shape)
    args.rule(reduce in REDUCTIONS, f"reduce must be one of {REDUCTIONS}, got {reduce!r}")
    args.rule(bool(reduce) == bool(axes), f"axes must be given for a reduction alone, got {axes} for {reduce!r}")
    args.rule(
        list(axes) == sorted({a for a in axes if 0 <= a < len(shape)}),
        f"axes must be axes of {list(shape)} in order, got {list(axes)}",
    )
    _check_program(args, program, len(arrays), len(scalars), len(shape), out is not None and not reduce)
    kept = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    if out is None:
        args.rule(place is None and not accumulate, "place and accumulate are for out, got one without out")
        name = np.dtype(dtype).name
        args.rule(name in _STORED, f"dtype must be a float, int32 or uint32, got {name}")
        return {"dtype": np.dtype(dtype)}
    if place is None:
        args.rule(math.prod(out.shape) == math.prod(kept), f"out must hold {list(kept)}, got {list(out.shape)}")
    else:
        _within(args, "out", out, place, kept)
    return {"dtype": out.dtype}


def _counts(args: Args, arrays: Any, views: Any, scalars: Any, shape: Any) -> None:
    args.rule(len(arrays) <= MOST_ARRAYS, f"arrays must be at most {MOST_ARRAYS}, got {len(arrays)}")
    args.rule(len(views) == len(arrays), f"views must be one for each of {len(arrays)} arrays, got {len(views)}")
    args.rule(len(scalars) <= MOST_SCALARS, f"scalars must be at most {MOST_SCALARS}, got {len(scalars)}")
    args.rule(len(shape) <= MOST_AXES, f"shape must have at most {MOST_AXES} axes, got {list(shape)}")
    args.rule(all(n > 0 for n in shape), f"shape must not be empty, got {list(shape)}")


def _within(args: Args, name: str, array: Array, view: View, shape: tuple[int, ...]) -> None:
    """Check that the view's first and last element lie within the array."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or np.dtype(dtype).name not in _STORED:
        found = type(array).__name__ if dtype is None else np.dtype(dtype).name
        raise args.fail(f"{name} must be a float, int32 or uint32 array on the device, got {found}; cast it first")
    if np.dtype(dtype).kind not in "iu":
        args.any_shape(name, array)
    strides, offset = view
    args.rule(len(strides) == len(shape), f"{name} must have a stride for each axis of {list(shape)}, got {strides}")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides))
    size = math.prod(array.shape)
    args.rule(
        offset >= 0 and min(strides, default=0) >= 0 and last < size,
        f"{name} must be read within its {size} elements, got strides {strides} from {offset} over {list(shape)}",
    )


def _check_program(args: Args, program: Any, arrays: int, scalars: int, axes: int, old: bool) -> None:
    limits = {"load": arrays, "scalar": scalars, "index": axes}
    args.rule(len(program) > 0, "program must have an instruction, got none")
    for number, (name, *operands) in enumerate(program):
        known = SOURCES[name] if name in SOURCES else FUNCTIONS[name].arity if name in FUNCTIONS else None
        args.rule(known is not None, f"program must be of known functions, got {name!r}; register_operator adds one")
        below = limits.get(name, number)
        args.rule(
            len(operands) == known and all(0 <= i < below for i in operands),
            f"program must give {name} {known} operands below {below}, got {operands}",
        )
        args.rule(name != "old" or old, 'program may have "old" only with out and without reduce, got one otherwise')


@fused.reference
def _(
    program: Program,
    arrays: tuple[np.ndarray, ...],
    views: tuple[View, ...],
    scalars: tuple[float, ...],
    shape: tuple[int, ...],
    reduce: str,
    axes: tuple[int, ...],
    out: np.ndarray | None,
    place: View | None,
    accumulate: bool,
    dtype: Any,
) -> np.ndarray:
    compute = compute_dtype(*arrays, out)
    viewed = [up(_viewed(a, view, shape), compute) for a, view in zip(arrays, views)]
    kept = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    if out is None:
        target = None
    elif place is None:
        target = out.reshape(kept)
    else:
        target = _viewed(out, place, kept)
    old = None if target is None else up(target, compute)
    result = evaluate(program, viewed, scalars, shape, compute, old)
    if reduce:
        result = result.sum(axis=axes) if reduce == "sum" else result.max(axis=axes)
    if accumulate:
        result = result + old
    if target is None:
        wide = compute == FLOAT64 and np.dtype(dtype).kind not in "iu"  # the oracle is never rounded
        return np.array(result, compute if wide else dtype, order="C")
    target[...] = result
    return out  # type: ignore[return-value]


def _viewed(array: np.ndarray, view: View, shape: tuple[int, ...]) -> np.ndarray:
    strides, offset = view
    flat = array.reshape(-1)[offset:]
    return np.lib.stride_tricks.as_strided(flat, shape, [s * array.itemsize for s in strides])
