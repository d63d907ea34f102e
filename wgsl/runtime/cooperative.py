"""Lanes of a subgroup in kernels with cooperative matrices, found by a probe."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.wgsl.runtime import matrix_units
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape
from wgrad.wgsl.runtime.cooperative_text import constant_of

LANES = (64, 32, 16, 8)  # that the kernels have variants for
_INVOCATIONS, _SIDE = 64, 16


def lanes_of(device: Any) -> int:
    """Return the lanes of a subgroup in kernels with cooperative matrices.

    The driver chooses the size, which may differ for other kernels: RADV runs these in subgroups of 64.

    Raises:
        DeviceError: there is no variant for these subgroups, or a 16 x 16 x 16 matmul is wrong.
    """
    lanes = device.zeros((_INVOCATIONS,), np.int32)
    out = device.zeros((_INVOCATIONS // min(LANES), _SIDE, _SIDE))
    device.launch("cooperative_probe", [lanes, out], [0], (1, 1, 1), constant_of(device.matrix_shape))
    return _judged(device.download(lanes).astype(np.int64), device.download(out))


def choose_variants(device: Any, card: str, shape: Shape | None = None) -> None:
    """Choose the variants of the tensor-core kernels for a device that was just opened.

    If there are none, or not those that were checked, the device continues without tensor cores, and
    `tensor_cores_off` says why. shape: of its cooperative matrices.

    Raises:
        DeviceError: there are none, and this process is the check.
    """
    device.matrix_shape = shape or BLOCK
    try:
        device.lanes = lanes_of(device)
        checked = matrix_units.checked_lanes(card)
        if checked not in (0, device.lanes) and not matrix_units.on_trial():
            raise DeviceError(f"the driver's subgroups have {device.lanes} lanes, and had {checked} when checked")
    except DeviceError as error:
        if matrix_units.on_trial() or isinstance(error, DeviceLost):
            raise
        device.tensor_cores_off = str(error)
        device.matrix_units = device.stacks_weights = False


def _judged(words: np.ndarray, out: np.ndarray) -> int:
    size = int(words[0]) >> 16
    if size not in LANES:
        raise DeviceError(f"tensor cores: the driver runs their kernels in subgroups of {size}, not of 8, 16, 32 or 64")
    at = np.arange(_INVOCATIONS)
    if not np.array_equal(words, (size * 256 + at % size) * 256 + at // size):
        raise DeviceError(f"tensor cores: the driver does not number the lanes of its subgroups of {size} in order")
    n = np.arange(_SIDE * _SIDE).reshape(_SIDE, _SIDE)
    exact = (n % 13) @ (n % 11)
    wrong = int((out[: _INVOCATIONS // size] != exact).sum())
    if wrong:
        total = _INVOCATIONS // size * exact.size
        raise DeviceError(
            f"tensor cores: {wrong} of {total} elements of a 16x16x16 matmul are wrong: update the driver"
        )
    return size
