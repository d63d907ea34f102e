"""Reductions: sum, sum over rows, gradient norm. Two passes of fixed order, no float atomics: the same bits each run.

Shaders: reduce.wgsl, reduce_rows.wgsl.
"""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import Elements, compute_type, next_power_of_two, same_block, vector_width, wgsl_type
from wgrad.wgsl.runtime.compile import Constant

_MAX_PARTS = 1024  # workgroups of a first pass: enough to fill a large card
_MAX_CHUNKS = 256


class ReduceOps(Elements):
    def sum(self, x: Array) -> Array:
        """All elements -> float32 [1]."""
        return self._reduce_all("sum_part", x, self.empty((1,)))

    def grad_norm(self, g: Array) -> Array:
        """float32 [2]: sum of squares of the finite elements, number of elements that are not finite."""
        return self._reduce_all("norm_part", g, self.empty((2,)))

    def _reduce_all(self, entry: str, x: Array, total: Array) -> Array:
        vec = vector_width(x.size)
        constants: dict[str, Constant] = {
            "VEC": vec,
            "PAIR": total.size == 2,
            "C_T": compute_type(vec),
            "B_T": "vec4<u32>" if vec == 4 else "u32",
            "X_T": wgsl_type(x.dtype, vec),
        }
        windows = list(self.flat_parts([x]))
        counts = [min(-(-part.size // (vec * 1024)), _MAX_PARTS) for _, (part,) in windows]
        parts = self.empty((max(sum(counts), 1), 2))
        slot = 0
        for (_, (part,)), count in zip(windows, counts):
            params = [part.size // vec, slot, 0]
            work = float(part.nbytes)
            self.launch("reduce", [part, parts, None], params, (count, 1, 1), constants, entry=entry, work=work)
            slot += count
        # The type of x plays no part in the last pass: leave one variant of it.
        last: dict[str, Constant] = {"VEC": 1, "PAIR": total.size == 2, "C_T": "f32", "B_T": "u32", "X_T": "f32"}
        self.launch("reduce", [None, parts, total], [0, 0, slot], (1, 1, 1), last, entry="finish")
        return total

    def sum_rows(self, x: Array, *, out: Array | None = None, accumulate: bool = False) -> Array:
        """[R, C] -> float32 [C] (added to out when accumulate); the backward of bias."""
        rows, columns = x.shape
        if out is None:
            out, accumulate = self.empty((columns,)), False
        elif same_block(x, out):
            raise ValueError("sum_rows: x and out lie in one buffer; give out memory of its own")
        vec = vector_width(columns)
        wide = min(64, max(8, next_power_of_two(columns // vec)))
        tiles = -(-columns // vec // wide)
        row_step = 4 * 256 // wide
        for first, count, (part,) in self.row_parts([x]):
            chunks = max(1, min(-(-count // row_step), _MAX_CHUNKS, 2048 // tiles))
            step = -(-count // chunks)
            chunks = -(-count // step)
            add = accumulate or first > 0
            if chunks == 1:
                self._sum_rows(part, out, count, 1, vec, wide, add)
            else:
                middle = self.empty((chunks, columns))
                self._sum_rows(part, middle, step, chunks, vec, wide, False)
                self._sum_rows(middle, out, chunks, 1, vec, wide, add)
        return out

    def _sum_rows(self, x: Array, out: Array, step: int, chunks: int, vec: int, wide: int, accumulate: bool) -> None:
        rows, columns = x.shape
        constants: dict[str, Constant] = {
            "WIDE": wide,
            "ACCUMULATE": accumulate,
            "C_T": compute_type(vec),
            "X_T": wgsl_type(x.dtype, vec),
        }
        params = [rows, columns // vec, step]
        groups = (-(-columns // vec // wide), chunks, 1)
        self.launch("reduce_rows", [x, out], params, groups, constants, work=float(x.nbytes))
