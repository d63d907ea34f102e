"""A cache of experts in slots. Shaders: moe_place.wgsl, moe_copy.wgsl."""

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


@implements("copy_experts")
def copy_experts(device: Runtime, copies: Array, source: Array, out: Array, experts: int, slots: int) -> None:
    nbytes = source.nbytes // experts
    unit = 16 if nbytes % 16 == 0 else 4
    constants: dict[str, Constant] = {"T": "vec4<u32>" if unit == 16 else "u32"}
    units, pairs = nbytes // unit, copies.shape[0]
    groups = (-(-units // (_LOADS * GROUP)), pairs, 1)
    device.launch("moe_copy", [copies, source, out], [units], groups, constants, work=2.0 * nbytes * pairs)
