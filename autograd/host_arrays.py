"""Convert and upload numbers of the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.modes import refuse_in_step
from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError

_NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32, "bool": np.uint32}
_STORED = ("float32", "float16", "bfloat16", "float64", "int32", "uint32")


def to_device(name: str, host: Any, device: Device, dtype: Any = None) -> Array:
    """Upload numbers in a dtype, by default float32, int32 or uint32 instead of 64 bits."""
    refuse_in_step("makes a Tensor of numbers of the host")
    array = np.asarray(host)
    wanted = check_dtype(name, _NARROW.get(array.dtype.name, array.dtype) if dtype is None else dtype)
    if array.size == 0:
        raise WgradError(f"{name}: an array must not be empty, got shape {list(array.shape)}")
    return device.upload(as_dtype(name, array, wanted))


def check_dtype(name: str, dtype: Any) -> np.dtype:
    """Return a dtype. WgradError: a Tensor cannot have it."""
    wanted: np.dtype = np.dtype(dtype)
    if wanted.name not in _STORED:
        raise WgradError(f"{name}: numbers must be floats or integers of 32 bits, got {wanted.name}; convert them")
    return wanted


def as_dtype(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in another dtype. WgradError: its whole numbers are outside the range of an integer dtype."""
    if dtype.kind in "iu" and array.dtype.kind in "iuf" and not np.can_cast(array.dtype, dtype):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if not (array.min() >= low and array.max() <= high):  # also false for NaN
            raise WgradError(
                f"{name}: numbers must be from {low} to {high} for {dtype.name}, got {array.min()} to {array.max()}; "
                "use a float dtype, or smaller numbers"
            )
    with np.errstate(over="ignore"):  # too large for float16 becomes inf, as in PyTorch
        return array.astype(dtype)
