"""Arithmetic on the host that computes the judged outputs of a case from those of its call.

Cases refer to these functions by name, because bundles of cases (`bundle.py`) are also judged without Python.
wgsl/bundle_runner.mjs has the same functions under the same names.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgrad.device.formats.nf4 import NESTED_BLOCK_SIZE

HostOutputs = dict[str, np.ndarray]


def _elements(made: HostOutputs) -> HostOutputs:
    """Judge each number by itself: their sizes are unrelated, and the largest would set the limit of all."""
    return {f"{name}[{i}]": array[i : i + 1] for name, array in made.items() for i in range(array.size)}


def _step(made: HostOutputs) -> HostOutputs:
    """Judge p and its change since `before`, which is much smaller than p."""
    rest = {name: array for name, array in made.items() if name != "before"}
    return {**rest, "step": made["p"] - made["before"]}


def _nf4(made: HostOutputs) -> HostOutputs:
    """Judge the quantization error, which is continuous, and not the codes, which jump at thresholds."""
    restored = made["restored"]
    return {"absmax": made["absmax"], "error": np.abs(restored - made["w"].astype(restored.dtype))}


def _nf4_double(made: HostOutputs) -> HostOutputs:
    codes, outer, absmax = made["codes"], made["nested_absmax"], made["absmax"]
    restored = made["code"][codes] * np.repeat(outer, NESTED_BLOCK_SIZE)[: codes.size] + made["offset"]
    # The error and not `restored` is judged: at a threshold either code is right, and the errors are equal. The largest
    # absmax is appended to set the scale, since offset and restored values are rounded to float32 at that size.
    return {
        "error": np.append(np.abs(restored - absmax), absmax.max()),
        "offset": made["offset"],
        "code": made["code"],
        "other codes": np.array([np.count_nonzero(made["packed"] != made["plain_packed"])], np.int32),
    }


FINISH: dict[str, Callable[[HostOutputs], HostOutputs]] = {
    "": lambda made: made,
    "elements": _elements,
    "step": _step,
    "nf4": _nf4,
    "nf4 double": _nf4_double,
}
