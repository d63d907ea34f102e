"""NF4 with and without double quantisation, quantised and dequantised on the device. Kernel: quantize.hip."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.nf4 import NESTED_BLOCK_SIZE, NF4Array, dynamic_map, thresholds
from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, Elements, type_code
from wgrad.hip.runtime.runtime import Long

_RUN = 16  # elements of a work-item


class QuantizeOps(Elements):
    _nf4_tables: tuple[Array, Array] | None = None

    def nf4_quantize(self, w: Array, block_size: int = 64, *, double: bool = False) -> NF4Array:
        """w [out, in] float32, float16 or bfloat16 -> packed codes and absmax (8-bit absmax when double)."""
        n = w.size
        packed, absmax = self.empty((-(-n // 2),), np.uint8), self.empty((-(-n // block_size),))
        runs = max(1, block_size // (_RUN * GROUP))
        arguments = [w, packed, absmax, Long(n), block_size, type_code(w.dtype)]
        self.launch(
            "quantize", "nf4_quantize", arguments, self.groups(n, _RUN * runs * GROUP), work=w.nbytes + packed.nbytes
        )
        shape = (int(w.shape[0]), int(w.shape[1]))
        return self._nest(packed, absmax, shape, block_size) if double else NF4Array(packed, absmax, shape, block_size)

    def _nest(self, packed: Array, absmax: Array, shape: tuple[int, int], block_size: int) -> NF4Array:
        blocks = absmax.size
        codes, offset = self.empty((blocks,), np.uint8), self.empty((1,))
        nested_absmax = self.empty((-(-blocks // NESTED_BLOCK_SIZE),))
        if self._nf4_tables is None:  # shared by all weights of this device
            self._nf4_tables = (self.upload(dynamic_map()), self.upload(thresholds(dynamic_map())))
        nested_code, limits = self._nf4_tables
        self.launch("quantize", "nf4_mean", [absmax, offset, blocks], (1, 1, 1), work=absmax.nbytes)
        arguments = [absmax, offset, limits, codes, nested_absmax, blocks]
        self.launch("quantize", "nf4_nest", arguments, self.groups(blocks, NESTED_BLOCK_SIZE), work=absmax.nbytes)
        return NF4Array(packed, codes, shape, block_size, nested_absmax, nested_code, offset)

    def nf4_dequantize(self, w: NF4Array, dtype: Any = np.float32) -> Array:
        """-> [out, in] float32, float16 or bfloat16."""
        if w.value_dtype not in ("float32", np.dtype(dtype).name):  # storing rounds to the type of y
            return self.cast(self.nf4_dequantize(w, np.dtype(w.value_dtype)), dtype)  # type: ignore[attr-defined]
        y = self.empty(w.shape, dtype)
        parts = [w.packed, w.absmax, w.nested_absmax, w.nested_code, w.nested_offset]
        groups = self.groups(y.size, _RUN * GROUP)
        arguments = [*parts, y, Long(y.size), w.block_size, w.nested_block_size, type_code(dtype)]
        self.launch("quantize", "nf4_dequantize", arguments, groups, work=y.nbytes + w.packed.nbytes)
        return y
