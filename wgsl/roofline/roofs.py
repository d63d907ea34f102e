"""Peak arithmetic rates of the device, measured by kernels that do nothing else: roof*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.device.roof import TENSOR_CORES, Roof
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_text import constant_of
from wgrad.wgsl.runtime.runtime import Runtime

_THREADS = 256
_CHAINS, _REPEATS, _LANES = 8, 4, 4  # multiply-adds of a pass of roof.wgsl: chains by repeats, of vectors of 4
_DOT_CHAINS, _DOT_FLOP = 16, 8  # of roof_int8.wgsl
_MATRIX_SUBGROUPS, _MATRICES, _MATRIX_FLOP = 4, 8, 2 * 16**3  # of roof_matrix.wgsl: sums of a subgroup
_GROUPS, _PASSES = 4096, 256  # about a millisecond on the largest GPUs
_SOFTWARE_GROUPS, _SOFTWARE_PASSES = 8, 64


def roofs(device: Runtime) -> list[Roof]:
    """Kernels for float32, 8-bit integers and, where the device has them, float16 and tensor cores."""
    groups, passes = (_SOFTWARE_GROUPS, _SOFTWARE_PASSES) if device.software else (_GROUPS, _PASSES)
    flop = 2.0 * groups * _THREADS * passes * _CHAINS * _REPEATS * _LANES
    found = [Roof("float32", flop, lambda: _multiply_adds(device, "f32", groups, passes))]
    if device.float16:
        found.append(Roof("float16", flop, lambda: _multiply_adds(device, "f16", groups, passes)))
    flop = float(groups * _THREADS * passes * _DOT_CHAINS * _REPEATS * _DOT_FLOP)
    found.append(Roof("int8", flop, lambda: _dot_products(device, groups, passes)))
    if device.matrix_units:
        flop = float(groups * _MATRIX_SUBGROUPS * passes * _MATRICES * _MATRIX_FLOP)
        found.append(Roof(TENSOR_CORES, flop, lambda: matrix_multiply_adds(device, groups, passes)))
    return found


def _multiply_adds(device: Runtime, element: str, groups: int, passes: int) -> Array:
    out = device.empty((groups * _THREADS,))
    work = 2.0 * out.size * passes * _CHAINS * _REPEATS * _LANES
    constants = {"S_T": element, "V_T": f"vec4<{element}>"}
    device.launch("roof", [out], [passes, 0.5], (groups, 1, 1), constants, work=work)
    return out


def _dot_products(device: Runtime, groups: int, passes: int) -> Array:
    out = device.empty((groups * _THREADS,), np.int32)
    work = float(out.size * passes * _DOT_CHAINS * _REPEATS * _DOT_FLOP)
    device.launch("roof_int8", [out], [passes, 0x01FF0201], (groups, 1, 1), work=work)
    return out


def matrix_multiply_adds(device: Runtime, groups: int, passes: int) -> Array:
    """Return [groups, 4 subgroups, 16, 16]: the sum of a subgroup's matrices, each of `passes` matmuls."""
    out = device.empty((groups, _MATRIX_SUBGROUPS, 16, 16))
    work = float(groups * _MATRIX_SUBGROUPS * passes * _MATRICES * _MATRIX_FLOP)
    lanes = device.lanes
    constants: dict[str, Constant] = {"SGS": _MATRIX_SUBGROUPS, "LANES": lanes, "FOURS": 64 // lanes}
    constants |= constant_of(device.matrix_shape)
    device.launch("roof_matrix", [out], [passes], (groups, 1, 1), constants, work=work)
    return out
