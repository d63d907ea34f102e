"""NF4 with and without double quantisation, quantised and dequantised on the device, value for value as bitsandbytes.

Shaders: nf4_quantize.wgsl, nf4_nested.wgsl, nf4_dequantize.wgsl.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, vector_width, wgsl_type
from wgrad.wgsl.reduce import ReduceOps
from wgrad.wgsl.runtime.compile import Constant

# fmt: off
NF4_LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on
NESTED_BLOCK_SIZE = 256
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}

ROUNDING = {"float32": 0, "float16": 1, "bfloat16": 2}  # of restored values, as the shaders know it


@dataclass(frozen=True)
class NF4Blocks:
    """The fields of autograd's NF4Array, which wraps it: the rooms know each other only by these names."""

    packed: Array
    absmax: Array
    shape: tuple[int, int]
    block_size: int = 64
    nested_absmax: Array | None = None
    nested_code: Array | None = None
    nested_offset: Array | None = None
    nested_block_size: int = NESTED_BLOCK_SIZE
    value_dtype: str = "float32"


@cache
def dynamic_map() -> np.ndarray:
    """The signed 8-bit dynamic data type, float32 [256], rising: after the sign, 0 to 6 zero bits choose the decade
    from 1 down to 1e-6, the bits left a linear fraction of it: the middles of equal parts of [0.1, 1]; and 0 and 1.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), section 2.2. Bitsandbytes builds it in
    float32 with torch.linspace, which steps from both ends to the middle; so does this, to the bit.
    """
    values: list[np.ndarray] = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        parts = 2**decade
        start, stop = np.float32(0.1), np.float32(1)
        step = float(np.float32((stop - start) / np.float32(parts)))
        i = np.arange(parts + 1)
        edges = np.where(i < (parts + 1) // 2, float(start) + step * i, float(stop) - step * (parts - i))
        edges = edges.astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [middles, -middles]
    return np.sort(np.concatenate(values))


def _thresholds(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1] + levels[1:]) / np.float32(2)


class NF4Ops(ReduceOps):
    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Blocks:
        """w [out, in] float32, float16 or bfloat16 -> packed codes and absmax (8-bit absmax when double)."""
        n = w.size
        packed = self.empty((-(-n // 2),), np.uint8)
        absmax = self.empty((-(-n // block_size),))
        kind = _KINDS[w.dtype.name]
        vec = n % 8 == 0
        wide = ("vec4<f32>" if kind == 0 else "vec4<u32>") if vec else ("f32" if kind == 0 else "u32")
        words = max(1, block_size // (8 * GROUP))
        constants: dict[str, Constant] = {"BLOCK": block_size, "WORDS": words, "KIND": kind, "VEC": vec, "X_T": wide}
        constants |= {f"THRESHOLD_{i}": float(t) for i, t in enumerate(_thresholds(NF4_LEVELS))}
        # Pieces whose codes and absmax start at multiples of 256 bytes; only w can be larger than a binding.
        for first, (part,) in self.flat_parts([w], multiple=64 * block_size):
            count, blocks = part.size, -(-part.size // block_size)
            codes = self.view(packed, (-(-count // 2),), first // 2)
            peaks = self.view(absmax, (blocks,), first // block_size)
            groups = self.groups(count, 8 * words * GROUP)
            self.launch("nf4_quantize", [part, codes, peaks], [count], groups, constants, work=1.6 * part.nbytes)
        shape = (int(w.shape[0]), int(w.shape[1]))
        return self._nest(packed, absmax, shape, block_size) if double else NF4Blocks(packed, absmax, shape, block_size)

    def _nest(self, packed: Array, absmax: Array, shape: tuple[int, int], block_size: int) -> NF4Blocks:
        blocks = absmax.size
        codes = self.empty((blocks,), np.uint8)
        nested_absmax = self.empty((-(-blocks // NESTED_BLOCK_SIZE),))
        offset = self.empty((1,))
        nested_code, thresholds = self._nested_tables()
        arrays = [absmax, self.sum(absmax), thresholds, offset, codes, nested_absmax]
        self.launch("nf4_nested", arrays, [blocks], self.groups(blocks, NESTED_BLOCK_SIZE), work=5.0 * blocks)
        return NF4Blocks(packed, codes, shape, block_size, nested_absmax, nested_code, offset)

    def _nested_tables(self) -> tuple[Array, Array]:
        """The 8-bit map, shared by all weights of this device, and its thresholds."""
        tables: tuple[Array, Array] | None = self.__dict__.get("_nf4_tables")
        if tables is None:
            tables = (self.upload(dynamic_map()), self.upload(_thresholds(dynamic_map())))
            self.__dict__["_nf4_tables"] = tables
        return tables

    def nf4_dequantize(self, w: Any, dtype: Any = np.float32) -> Array:
        """-> [out, in] float32 or float16. w: an NF4Blocks, or anything with its fields."""
        y = self.empty(w.shape, dtype)
        n = y.size
        vec = vector_width(n)
        nested = w.nested_absmax is not None
        constants: dict[str, Constant] = {"VEC": vec, "NESTED": nested, "Y_T": wgsl_type(y.dtype, vec)}
        constants["ROUND"] = ROUNDING[w.value_dtype]
        shifts = [w.block_size.bit_length() - 1, w.nested_block_size.bit_length() - 1]
        for first, (part,) in self.flat_parts([y]):
            count = part.size // vec
            codes = self.view(w.packed, (-(-part.size // 2),), first // 2)
            arrays = [codes, w.absmax, w.nested_absmax, w.nested_code, w.nested_offset, part]
            work = float(part.nbytes)
            params = [count, first, *shifts, 0]
            self.launch("nf4_dequantize", arrays, params, self.groups(count, 4 * GROUP), constants, work=work)
        return y
