"""Check the arguments of an operator's call: shapes with axes named by letters, and kinds of dtype.

Axes are named by letters (`R C`). A letter is bound to the first size that it meets, and must agree from then on.
Kinds of dtype: `float` (float32, also float16 and bfloat16 if the device computes in them), `f32`, `f16` (for storage,
on any device), `weight` (float32, float16, bfloat16), `i32`, `u32`, `u8`. float64 passes wherever float32 does: only
the reference device has such arrays.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
KINDS: dict[str, tuple[Any, ...]] = {
    "float": (np.float32, np.float16, ml_dtypes.bfloat16, np.float64),
    "f32": (np.float32, np.float64),
    "f16": (np.float16, np.float64),
    "weight": (np.float32, np.float16, ml_dtypes.bfloat16, np.float64),
    "i32": (np.int32,),
    "u32": (np.uint32,),
    "u8": (np.uint8,),
}
_ALLOWED = {kind: frozenset(np.dtype(t) for t in types) for kind, types in KINDS.items()}


class Args:
    """Checks the arguments of one call. Methods raise ShapeError, and return the object itself to be chained.

    Args:
        op: Name of the operator, for errors.
        device: Device of the call; None: do not check what dtypes it computes in.

    Attributes:
        size: Size of every axis so far, by its letter.
    """

    def __init__(self, op: str, device: Device | None = None) -> None:
        self.op = op
        self.device = device
        self.size: dict[str, int] = {}
        self._from: dict[str, str] = {}

    def fail(self, message: str) -> ShapeError:
        """Return an error that names the operator."""
        return ShapeError(f"{self.op}: {message}")

    def array(self, name: str, value: Any, axes: str, kind: str = "float", hint: str = "") -> Args:
        """Check that a value is an array with these axes (`... C` allows any number in front; digits are sizes)."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            raise self.fail(f"{name} must be an array on the device, got {type(value).__name__}; upload it first")
        self._dtype(name, np.dtype(dtype), kind)
        letters = axes.split()
        if letters and letters[0] == "...":
            letters = letters[1:]
            if len(shape) < len(letters) + 1:
                raise self.fail(
                    f"{name} must have at least {len(letters) + 1} axes, got shape {list(shape)}; reshape it"
                )
            shape = shape[len(shape) - len(letters) :]
        elif len(shape) != len(letters):
            raise self.fail(f"{name} must be [{', '.join(letters)}], got shape {list(shape)}; {hint or 'reshape it'}")
        for letter, size in zip(letters, shape):
            self._axis(name, letters, letter, int(size), value, hint)
        return self

    def any_shape(self, name: str, value: Any, kind: str = "float") -> Args:
        """Check that a value is an array, of any shape."""
        return self.array(name, value, " ".join(f"{name}{i}" for i in range(len(getattr(value, "shape", ())))), kind)

    def same_shape(self, name: str, value: Any, other_name: str, other: Any) -> Args:
        """Check that `other` is an array with the shape of `value`, which was checked before."""
        self.any_shape(other_name, other)
        return self.rule(
            tuple(value.shape) == tuple(other.shape),
            f"{other_name} must have the shape of {name} {list(value.shape)}, got {list(other.shape)}; "
            "reshape it (nothing is broadcast)",
        )

    def axes(self, name: str, value: Any, axes: str, hint: str = "") -> Args:
        """Check the axes of a value that has a shape but is no array."""
        letters = axes.split()
        for letter, size in zip(letters, value.shape):
            self._axis(name, letters, letter, int(size), value, hint)
        return self

    def _axis(self, name: str, letters: list[str], letter: str, size: int, value: Any, hint: str) -> None:
        wanted = int(letter) if letter.isdigit() else self.size.get(letter)
        if wanted is None:
            if size < 1:
                raise self.fail(
                    f"{name} must not be empty, got shape {list(value.shape)}; leave the call out for an empty batch"
                )
            self.size[letter], self._from[letter] = size, name
        elif wanted != size:
            source = f" from {self._from[letter]}" if letter in self._from else ""
            source = "" if letter.isdigit() else f" with {letter} = {wanted}{source}"
            raise self.fail(
                f"{name} must be [{', '.join(letters)}]{source}, "
                f"got shape {list(value.shape)}; {hint or 'transpose it, or pass the array that belongs here'}"
            )

    def _dtype(self, name: str, dtype: np.dtype, kind: str) -> None:
        if dtype not in _ALLOWED[kind]:
            *some, last = (np.dtype(t).name for t in KINDS[kind] if t is not np.float64)
            names = f"{', '.join(some)} or {last}" if some else last
            raise self.fail(f"{name} must be {names}, got {dtype.name}; cast it first")
        # Weights and stored scales are decoded from their bits, which needs no arithmetic in 16 bits.
        if dtype == F16 and kind == "float" and self.device is not None and not self.device.float16:
            raise self.fail(
                f"{name} is float16, which {self.device.description} takes for weights only; use float32 "
                "(--compute float32)"
            )
        if dtype == BF16 and kind == "float" and self.device is not None and not self.device.bfloat16:
            raise self.fail(
                f"{name} is bfloat16, which {self.device.description} takes for weights only; use float32 or float16"
            )

    def dtype(self, name: str, value: Any, default: Any) -> np.dtype:
        """Return the dtype of a result: `value`, or the default if it is None."""
        dtype: np.dtype = np.dtype(default if value is None else value)
        self._dtype(name, dtype, "float")
        return dtype

    def rule(self, holds: bool, message: str) -> Args:
        """Check any other rule. message: for the error if it does not hold."""
        if not holds:
            raise self.fail(message)
        return self
