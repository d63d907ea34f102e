"""Open a lost GPU again in the same process."""

from __future__ import annotations

import time
from typing import Any

from wgrad.device.bounded import bounded
from wgrad.device.errors import DeviceError, DeviceLost

# After a reset, a driver does not open the GPU for a while, and may hang when it does.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_SECONDS = 60.0
_LEAST_SHARE = 1 / 16  # of the work at once
_SETTINGS = (
    "reason",
    "int8_products",
    "subgroups",
    "matrix_units",
    "stacks_weights",
    "tensor_cores_off",
)


def reopen(lost: Any, losses: int) -> Any:
    """Return a device like `lost` (a WgpuDevice), with half the work at once for each loss.

    Raises:
        DeviceLost: the GPU does not open again.
    """
    lost.close()

    def late() -> DeviceLost:
        return DeviceLost(f"{lost.description} was lost, and does not open again: its driver hangs")

    made = bounded(lambda: _open(lost), _SECONDS, late)
    for name in _SETTINGS:
        setattr(made, name, getattr(lost, name))
    made.limit_memory(lost._pool.limit)
    made._submission_size.lower(max(0.5**losses, _LEAST_SHARE))
    return made


def _open(lost: Any) -> Any:
    said = ""
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            made = type(lost)(lost.spec, max_binding_bytes=lost.max_binding_bytes)
        except DeviceError as error:
            said = str(error)
            continue
        if made.facts == lost.facts and made.matrix_units >= lost.matrix_units:
            return made
        said = f"{made.description} is there in its place"
    raise DeviceLost(f"{lost.description} was lost, and does not open again: {said}")
