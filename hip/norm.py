"""RMSNorm, forward and backward. Kernel: norm.hip."""

from __future__ import annotations

from typing import Any

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, type_codes
from wgrad.hip.reduce import ROWS_PER_PART, ReduceOps

# Columns up to which a row is taken by 16 lanes, by a wave; above, by a work-group.
_ROW16, _WAVE = 256, 1024


class NormOps(ReduceOps):
    def _by_rows(self, kernel: str, rows: int, columns: int) -> tuple[str, tuple[int, int, int]]:
        """The kernel for rows of this length, and its work-groups."""
        lanes, suffix = (
            (16, "_row16") if columns <= _ROW16 else (self.wave, "_wave") if columns <= _WAVE else (GROUP, "")
        )
        return kernel + suffix, self.groups(rows * lanes, GROUP)

    def rms_norm(self, x: Array, weight: Array, eps: float, *, dtype: Any = None) -> tuple[Array, Array]:
        """x [R, C], weight float32 [C] -> y [R, C], rstd float32 [R]."""
        rows, columns = x.shape
        y, rstd = self.empty(x.shape, x.dtype if dtype is None else dtype), self.empty((rows,))
        if rows:
            arguments = [x, weight, y, rstd, rows, columns, float(eps), type_codes(x, y)]
            kernel, groups = self._by_rows("rms_norm", rows, columns)
            self.launch("norm", kernel, arguments, groups, work=x.nbytes + y.nbytes)
        return y, rstd

    def rms_norm_backward(
        self,
        dy: Array,
        x: Array,
        weight: Array,
        rstd: Array,
        *,
        residual_grad: Array | None = None,
        need_dweight: bool = True,
        dtype: Any = None,
    ) -> tuple[Array, Array | None]:
        """-> dx [R, C] (+ residual_grad when given), dweight float32 [C] or None."""
        rows, columns = x.shape
        dx = self.empty(x.shape, x.dtype if dtype is None else dtype)
        if rows:
            arrays = [dy, x, weight, rstd, residual_grad, dx]
            arguments = [*arrays, rows, columns, type_codes(dy, x, residual_grad, dx)]
            kernel, groups = self._by_rows("rms_norm_backward", rows, columns)
            work = sum(a.nbytes for a in arrays if a is not None)
            self.launch("norm", kernel, arguments, groups, work=work)
        return dx, self._dweight(dy, x, rstd) if need_dweight else None

    def _dweight(self, dy: Array, x: Array, rstd: Array) -> Array:
        rows, columns = x.shape
        parts = max(1, -(-rows // ROWS_PER_PART))
        part = self.empty((parts, columns))
        arguments = [dy, x, rstd, part, rows, columns, ROWS_PER_PART, type_codes(dy, x)]
        grid = (-(-columns // GROUP), parts, 1)
        self.launch("norm", "rms_norm_dweight", arguments, grid, work=dy.nbytes + x.nbytes)
        return self.view(part, (columns,)) if parts == 1 else self._sum_parts(part, self.empty((columns,)))
