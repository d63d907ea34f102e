"""NF4 with and without double quantisation, quantised and dequantised on the device, value for value as bitsandbytes.

Shaders: nf4_quantize.wgsl, nf4_nested.wgsl, nf4_dequantize.wgsl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.nf4 import LEVELS, NESTED_BLOCK_SIZE, NF4Array, dynamic_map, thresholds
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, vector_width, wgsl_type
from wgrad.wgsl.reduce import ReduceOps
from wgrad.wgsl.runtime.compile import Constant

_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}

ROUNDING = {"float32": 0, "float16": 1, "bfloat16": 2}  # of restored values, as the shaders know it


class NF4Ops(ReduceOps):
    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Array:
        """w [out, in] float32, float16 or bfloat16 -> packed codes and absmax (8-bit absmax when double)."""
        n = w.size
        packed = self.empty((-(-n // 2),), np.uint8)
        absmax = self.empty((-(-n // block_size),))
        kind = _KINDS[w.dtype.name]
        vec = n % 8 == 0
        wide = ("vec4<f32>" if kind == 0 else "vec4<u32>") if vec else ("f32" if kind == 0 else "u32")
        words = max(1, block_size // (8 * GROUP))
        constants: dict[str, Constant] = {"BLOCK": block_size, "WORDS": words, "KIND": kind, "VEC": vec, "X_T": wide}
        constants |= {f"THRESHOLD_{i}": float(t) for i, t in enumerate(thresholds(LEVELS))}
        # Pieces whose codes and absmax start at multiples of 256 bytes; only w can be larger than a binding.
        for first, (part,) in self.flat_parts([w], multiple=64 * block_size):
            count, blocks = part.size, -(-part.size // block_size)
            codes = self.view(packed, (-(-count // 2),), first // 2)
            peaks = self.view(absmax, (blocks,), first // block_size)
            groups = self.groups(count, 8 * words * GROUP)
            self.launch("nf4_quantize", [part, codes, peaks], [count], groups, constants, work=1.6 * part.nbytes)
        shape = (int(w.shape[0]), int(w.shape[1]))
        return self._nest(packed, absmax, shape, block_size) if double else NF4Array(packed, absmax, shape, block_size)

    def _nest(self, packed: Array, absmax: Array, shape: tuple[int, int], block_size: int) -> NF4Array:
        blocks = absmax.size
        codes = self.empty((blocks,), np.uint8)
        nested_absmax = self.empty((-(-blocks // NESTED_BLOCK_SIZE),))
        offset = self.empty((1,))
        nested_code, limits = self._nested_tables()
        arrays = [absmax, self.sum(absmax), limits, offset, codes, nested_absmax]
        self.launch("nf4_nested", arrays, [blocks], self.groups(blocks, NESTED_BLOCK_SIZE), work=5.0 * blocks)
        return NF4Array(packed, codes, shape, block_size, nested_absmax, nested_code, offset)

    def _nested_tables(self) -> tuple[Array, Array]:
        """The 8-bit map, shared by all weights of this device, and its thresholds."""
        tables: tuple[Array, Array] | None = self.__dict__.get("_nf4_tables")
        if tables is None:
            tables = (self.upload(dynamic_map()), self.upload(thresholds(dynamic_map())))
            self.__dict__["_nf4_tables"] = tables
        return tables

    def nf4_dequantize(self, w: NF4Array, dtype: Any = np.float32) -> Array:
        """-> [out, in] float32 or float16."""
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
