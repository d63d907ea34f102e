"""NF4 with and without double quantisation, quantised and dequantised on the device, value for value as bitsandbytes.

Shaders: quantize_nf4.wgsl, quantize_nf4_nested.wgsl, quantize_decode.wgsl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.nf4 import LEVELS, NESTED_BLOCK_SIZE, NF4Array, dynamic_map, thresholds
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, vector_width, wgsl_type
from wgrad.wgsl.formats import KINDS, weight_operand
from wgrad.wgsl.reduce import ReduceOps
from wgrad.wgsl.runtime.compile import Constant


class NF4Ops(ReduceOps):
    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Array:
        """w [out, in] float32, float16 or bfloat16 -> packed codes and absmax (8-bit absmax when double)."""
        n = w.size
        packed = self.empty((-(-n // 2),), np.uint8)
        absmax = self.empty((-(-n // block_size),))
        kind = KINDS[w.dtype.name]
        vec = n % 8 == 0
        wide = "vec4<f32>" if kind == 0 else "vec4<u32>"
        words = max(1, block_size // (8 * GROUP))
        constants: dict[str, Constant] = {"BLOCK": block_size, "WORDS": words, "KIND": kind, "VEC": vec, "X_T": wide}
        constants |= {f"THRESHOLD_{i}": float(t) for i, t in enumerate(thresholds(LEVELS))}
        # Pieces whose codes and absmax start at multiples of 256 bytes; only w can be larger than a binding.
        for first, (part,) in self.flat_parts([w], multiple=64 * block_size):
            count, blocks = part.size, -(-part.size // block_size)
            codes = self.view(packed, (-(-count // 2),), first // 2)
            peaks = self.view(absmax, (blocks,), first // block_size)
            groups = self.groups(count, 8 * words * GROUP)
            self.launch("quantize_nf4", [part, codes, peaks], [count], groups, constants, work=1.6 * part.nbytes)
        shape = (int(w.shape[0]), int(w.shape[1]))
        return self._nest(packed, absmax, shape, block_size) if double else NF4Array(packed, absmax, shape, block_size)

    def _nest(self, packed: Array, absmax: Array, shape: tuple[int, int], block_size: int) -> NF4Array:
        blocks = absmax.size
        codes = self.empty((blocks,), np.uint8)
        nested_absmax = self.empty((-(-blocks // NESTED_BLOCK_SIZE),))
        offset = self.empty((1,))
        nested_code, limits = self._nested_tables()
        arrays = [absmax, self.sum(absmax), limits, offset, codes, nested_absmax]
        self.launch("quantize_nf4_nested", arrays, [blocks], self.groups(blocks, NESTED_BLOCK_SIZE), work=5.0 * blocks)
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
        vec = vector_width(y.size)
        operand = weight_operand(w, table=True)
        constants: dict[str, Constant] = {**operand.constants, "VEC": vec, "Y_T": wgsl_type(y.dtype, vec)}
        per = max(1, round(y.size / operand.codes.size))
        for first, (part,) in self.flat_parts([y]):
            count = part.size // vec
            codes = self.view(operand.codes, (-(-part.size // per),), first // per)
            arrays = [None, codes, part, *[None] * 4, *operand.scales]
            params = [count, first, *operand.parameters, 0]
            groups = self.groups(count, 4 * GROUP)
            self.launch("quantize_decode", arrays, params, groups, constants, work=float(part.nbytes))
        return y
