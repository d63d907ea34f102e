"""sum and sum_rows, deterministic. Kernel: reduce.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_codes
from wgrad.hip.runtime.runtime import Long

ROWS_PER_PART = 64
MOST_PARTS = 512  # work-groups of the first pass of a sum


class ReduceOps(Elements):
    def sum_rows(self, x: Array, *, out: Array | None = None, accumulate: bool = False) -> Array:
        """[R, C] -> float32 [C] (out's dtype when given), added to `out` when `accumulate`."""
        out = self.empty((x.shape[1],)) if out is None else out
        return self._sum_parts(x, out, accumulate)

    def _sum_parts(self, x: Array, out: Array, accumulate: bool = False) -> Array:
        """Sums rows in parts of ROWS_PER_PART, then the parts, until one is left."""
        rows, columns = x.shape
        while rows > ROWS_PER_PART:
            parts = -(-rows // ROWS_PER_PART)
            part = self.empty((parts, columns))
            self._launch_sum_rows(x, part, rows, ROWS_PER_PART, False)
            x, rows = part, parts
        self._launch_sum_rows(x, out, rows, max(rows, 1), accumulate)
        return out

    def _launch_sum_rows(self, x: Array, out: Array, rows: int, rows_per: int, accumulate: bool) -> None:
        columns = x.shape[1]
        grid = (-(-columns // GROUP), max(1, -(-rows // rows_per)), 1)
        arguments = [x, out, rows, columns, rows_per, int(accumulate), type_codes(x, out)]
        if columns:
            self.launch("reduce", "sum_rows", arguments, grid, work=x.nbytes)

    def sum(self, x: Array) -> Array:
        """All elements -> float32 [1]."""
        parts = max(1, min(MOST_PARTS, -(-x.size // (GROUP * PER))))
        out = self.empty((1,))
        part = out if parts == 1 else self.empty((parts,))
        self.launch("reduce", "sum", [x, part, Long(x.size), type_codes(x)], (parts, 1, 1), work=x.nbytes)
        if part is not out:
            self.launch("reduce", "sum", [part, out, Long(parts), 0], (1, 1, 1), work=part.nbytes)
        return out
