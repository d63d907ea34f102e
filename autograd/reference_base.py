"""What every family of reference operators uses: the precision rule, and the bookkeeping around a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from wgrad.device.contract import NF4Array

FLOAT64 = np.dtype(np.float64)
FLOAT32 = np.dtype(np.float32)


def compute_dtype(*arrays: np.ndarray | None) -> np.dtype:
    """float64 when any argument is float64 (the oracle), else float32: float16 and bfloat16 are computed in float32."""
    return FLOAT64 if any(a is not None and a.dtype == FLOAT64 for a in arrays) else FLOAT32


def up(array: np.ndarray, compute: np.dtype) -> np.ndarray:
    """The array in the compute dtype; not a copy when it is already."""
    return array.astype(compute, copy=False)


def finish(result: np.ndarray, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Round a result to the dtype asked for. An oracle (float64) is never rounded."""
    return np.ascontiguousarray(result, dtype=compute if compute == FLOAT64 else dtype)


def store(result: np.ndarray, out: np.ndarray | None, accumulate: bool, dtype: Any, compute: np.dtype) -> np.ndarray:
    """Return the result, or write it into `out` (added to what is there when `accumulate`)."""
    if out is None:
        return finish(result, dtype, compute)
    out[...] = up(out, compute) + result if accumulate else result
    return out


def arrays_of(result: Any) -> Iterator[np.ndarray]:
    """Every NumPy array in an operator's result (an array, a tuple, an NF4Array or None)."""
    if isinstance(result, np.ndarray):
        yield result
    elif isinstance(result, tuple):
        for item in result:
            yield from arrays_of(item)
    elif isinstance(result, NF4Array):
        parts = (result.packed, result.absmax, result.nested_absmax, result.nested_code, result.nested_offset)
        for part in parts:
            yield from arrays_of(part)


def operator(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the reference device: count the memory of its results, and record it when capturing.

    Only the outermost call counts; an operator that is made of others is one entry of a recording.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside_operator:
            return method(self, *args, **kwargs)
        self._inside_operator = True
        try:
            with np.errstate(all="ignore"):  # infinity and not-a-number pass on without a word, as on every device
                result = method(self, *args, **kwargs)
        finally:
            self._inside_operator = False
        for array in arrays_of(result):
            self._pool.track(array)
        if self._recording is not None:
            self._recording.append(functools.partial(call, self, *args, **kwargs), result)
        return result

    return call
