"""Arithmetic on the host between what a case's call makes on the device and what is judged, by name.

By name, because a bundle of cases (`bundle.py`) is also judged where there is no Python: wgsl/bundle_runner.js has the
same functions under the same names.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgrad.device.formats.nf4 import NESTED_BLOCK_SIZE

HostOutputs = dict[str, np.ndarray]


def _elements(made: HostOutputs) -> HostOutputs:
    """Each number by itself: their sizes have nothing to do with each other, and the largest sets an output's limit."""
    return {f"{name}[{i}]": array[i : i + 1] for name, array in made.items() for i in range(array.size)}


def _step(made: HostOutputs) -> HostOutputs:
    """p as it is, and the step that it took from `before`, which is small beside it."""
    rest = {name: array for name, array in made.items() if name != "before"}
    return {**rest, "step": made["p"] - made["before"]}


def _nf4(made: HostOutputs) -> HostOutputs:
    """Codes jump where a value crosses a threshold, but the error of the nearest level does not: that is compared."""
    restored = made["restored"]
    return {"absmax": made["absmax"], "error": np.abs(restored - made["w"].astype(restored.dtype))}


def _nf4_double(made: HostOutputs) -> HostOutputs:
    codes, outer, absmax = made["codes"], made["nested_absmax"], made["absmax"]
    restored = made["code"][codes] * np.repeat(outer, NESTED_BLOCK_SIZE)[: codes.size] + made["offset"]
    # Not `restored` itself: at an edge either code is right, and both are equally far off. The largest absmax
    # stands at the end to give the scale: offset and restored value are rounded to float32 at that size.
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
