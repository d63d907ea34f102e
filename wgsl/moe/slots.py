"""A cache of experts in slots. Shaders: moe_place.wgsl, moe_keep.wgsl, moe_copy.wgsl, moe_gather.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP
from wgrad.wgsl.moe.routing import MOST_EXPERTS
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_LOADS = 4  # of an invocation


@implements("place_experts")
def place_experts(
    device: Runtime, ids: Array, held: Array, used: Array, counts: Array, experts: int
) -> tuple[Array, Array]:
    places, copies = device.empty(ids.shape, np.int32), device.empty((ids.size, 2), np.int32)
    constants: dict[str, Constant] = {"MOST_EXPERTS": MOST_EXPERTS}
    arrays, params = [ids, held, used, counts, places, copies], [ids.size, held.size, experts]
    device.launch("moe_place", arrays, params, (1, 1, 1), constants, work=float(held.size**2))
    return places, copies


@implements("keep_experts")
def keep_experts(device: Runtime, start: Array, held: Array, used: Array, counts: Array, counted: bool) -> Array:
    experts = start.size - 1
    origins = device.empty((experts, 2), np.int32)
    constants: dict[str, Constant] = {"MOST_EXPERTS": MOST_EXPERTS}
    arrays, params = [start, held, used, counts, origins], [experts, held.size, int(counted)]
    device.launch("moe_keep", arrays, params, (1, 1, 1), constants, work=float(experts**2))
    return origins


@implements("gather_experts")
def gather_experts(device: Runtime, origins: Array, source: Array, kept: Array, slots: int, out: Array | None) -> None:
    experts = origins.shape[0]
    arrays = [origins, source, kept, *([] if out is None else [out])]
    _copy(device, "moe_gather", arrays, experts, source.nbytes // experts)


@implements("copy_experts")
def copy_experts(device: Runtime, copies: Array, source: Array, out: Array, experts: int, slots: int) -> None:
    _copy(device, "moe_copy", [copies, source, out], copies.shape[0], source.nbytes // experts)


def _copy(device: Runtime, shader: str, arrays: list[Array], copied: int, nbytes: int) -> None:
    """Launch a shader that copies at most `copied` experts of `nbytes` bytes. arrays: its bindings."""
    unit = 16 if nbytes % 16 == 0 else 4
    constants: dict[str, Constant] = {"T": "vec4<u32>" if unit == 16 else "u32", "OUT": len(arrays) == 4}
    units = nbytes // unit
    groups = (-(-units // (_LOADS * GROUP)), copied, 1)
    device.launch(shader, arrays, [units], groups, constants, work=2.0 * nbytes * copied)
