"""Matrix products: dense and NF4 weights, forward and backward (gemm.hip: matrix unit; gemm_f32.hip: the rest)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.hip.buffers import Array
from wgrad.hip.runtime import Long, Runtime

_KIND = {"float32": 0, "float16": 1, "bfloat16": 2}
_SHORT = ("f32", "f16", "bf16")
_HAS_ACCUMULATE, _V_ALONG_RANK = 1, 2  # gemm_epilogue.hpp
_MIN_K_PER_SPLIT, _MAX_SPLITS = 256, 16
_DEPTH = 32  # splits of K are multiples of a tile's


@dataclass(frozen=True)
class Tile:
    """A work-group's tile of the result, and its work-items."""

    m: int
    n: int
    threads: int


# The shapes of gemm.hip; the float32 kernels have one.
_CDNA = {"big": Tile(256, 256, 512), "small": Tile(128, 128, 256)}
_RDNA = {"big": Tile(128, 128, 256), "small": Tile(64, 128, 128)}
_F32 = Tile(128, 128, 256)


@dataclass(frozen=True)
class Kernel:
    """Which kernel serves a product: file, name, tile, and the operands' arguments in front of the epilogue's."""

    source: str
    name: str
    tile: Tile
    operands: list[Any]
    dense: bool


class GemmOps(Runtime):
    """gemm, linear_nf4, linear_nf4_backward (autograd/device.py)."""

    def gemm(
        self,
        a: Array,
        b: Array,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        alpha: float = 1.0,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: tuple[Array, Array] | None = None,
        out: Array | None = None,
        accumulate: bool = False,
        dtype: Any = None,
    ) -> Array:
        batch = a.shape[0] if len(a.shape) == 3 else 1
        m, k = (a.shape[-1], a.shape[-2]) if trans_a else (a.shape[-2], a.shape[-1])
        n = b.shape[-2] if trans_b else b.shape[-1]
        if out is None:
            shape = (batch, m, n) if len(a.shape) == 3 else (m, n)
            out = self.empty(shape, dtype or (np.float32 if a.dtype != b.dtype else a.dtype))
        layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
        kernel = self._dense_kernel(a, b, layout, (m, n, k), batch)
        self._product(kernel, out, (m, n, k), batch, trans_b, alpha, bias, residual, lowrank, accumulate)
        return out

    def linear_nf4(
        self,
        x: Array,
        weight: Any,
        *,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: tuple[Array, Array] | None = None,
        dtype: Any = None,
    ) -> Array:
        (m, k), n = x.shape, weight.shape[0]
        out = self.empty((m, n), dtype or x.dtype)
        if k % 8:  # a row would start inside a group of codes
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(x, w, trans_b=True, bias=bias, residual=residual, lowrank=lowrank, out=out)
        kernel = self._nf4_kernel(x, weight, "nt", (m, n, k))
        self._product(kernel, out, (m, n, k), 1, True, 1.0, bias, residual, lowrank, False)
        return out

    def linear_nf4_backward(
        self, dy: Array, weight: Any, *, lowrank: tuple[Array, Array] | None = None, dtype: Any = None
    ) -> Array:
        (m, n), k = dy.shape, weight.shape[1]
        out = self.empty((m, k), dtype or dy.dtype)
        if k % 8 or n % 8:
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(dy, w, lowrank=lowrank, out=out)
        kernel = self._nf4_kernel(dy, weight, "nn", (m, k, n))
        self._product(kernel, out, (m, k, n), 1, False, 1.0, None, None, lowrank, False)
        return out

    # ---- which kernel --------------------------------------------------------------------
    def _shape(self, m: int, n: int, batch: int) -> tuple[str, Tile]:
        """The big tile where it fills the card."""
        shapes = _CDNA if self.wave == 64 else _RDNA
        big = shapes["big"]
        fills = _count(m, n, big) * batch >= self.compute_units
        return ("big", big) if fills else ("small", shapes["small"])

    def _dense_kernel(self, a: Array, b: Array, layout: str, mnk: tuple[int, int, int], batch: int) -> Kernel:
        m, n, k = mnk
        kind_a, kind_b = _KIND[a.dtype.name], _KIND[b.dtype.name]
        # Elements of a row of each operand: what vector loads must divide.
        rows = {"nn": (k, n), "nt": (k,), "tn": (m, n)}[layout]
        if kind_a == kind_b and kind_a and self.modules.has("gemm"):
            shape, tile = self._shape(m, n, batch)
            if any(row % 8 for row in rows):
                shape, tile = "unaligned", (_CDNA if self.wave == 64 else _RDNA)["small"]
            return Kernel("gemm", f"gemm_{_SHORT[kind_a]}_{layout}_{shape}", tile, [a, b], True)
        if kind_a == 0 and (kind_b == 0 or layout != "tn") and not any(row % 4 for row in rows):
            name = f"gemm_f32_{layout}" if kind_b == 0 else f"gemm_f32_{_SHORT[kind_b]}_{layout}"
            return Kernel("gemm_f32", name, _F32, [a, b], True)
        return Kernel("gemm_f32", f"gemm_any_{layout}", _F32, [a, b, kind_a, kind_b], True)

    def _nf4_kernel(self, x: Array, w: Any, layout: str, mnk: tuple[int, int, int]) -> Kernel:
        m, n, _ = mnk
        operands = [x, w.packed, w.absmax, w.nested_absmax, w.nested_code, w.nested_offset]
        operands += [w.block_size.bit_length() - 1, w.nested_block_size.bit_length() - 1]
        nested = "_nested" if w.nested_absmax is not None else ""
        kind = _KIND[x.dtype.name]
        if kind and self.modules.has("gemm"):
            shape, tile = self._shape(m, n, 1)
            return Kernel("gemm", f"gemm_nf4{nested}_{_SHORT[kind]}_{layout}_{shape}", tile, operands, False)
        if kind:
            operands[0] = self.cast(x, np.float32)  # type: ignore[attr-defined]
        return Kernel("gemm_f32", f"gemm_nf4{nested}_f32_{layout}", _F32, operands, False)

    # ---- launch --------------------------------------------------------------------------
    def _splits(self, m: int, n: int, k: int, batch: int, tile: Tile) -> tuple[int, int]:
        """Splits of K, and K of each: until every compute unit has work, as long as each split is worth its launch."""
        tiles = _count(m, n, tile)
        wanted = min(self.compute_units // tiles, k // _MIN_K_PER_SPLIT, _MAX_SPLITS)
        if batch > 1 or wanted < 2:
            return 1, 0
        per_split = -(-k // wanted // _DEPTH) * _DEPTH
        return -(-k // per_split), per_split

    def _product(
        self,
        kernel: Kernel,
        out: Array,
        mnk: tuple[int, int, int],
        batch: int,
        trans_b: bool,
        alpha: float,
        bias: Array | None,
        residual: Array | None,
        lowrank: tuple[Array, Array] | None,
        accumulate: bool,
    ) -> None:
        m, n, k = mnk
        tile = kernel.tile
        splits, per_split = self._splits(m, n, k, batch, tile)
        u, v = lowrank or (None, None)
        flags = _HAS_ACCUMULATE * accumulate
        kinds = [_kind(out), _kind(residual), _kind(u), _kind(v)]
        parts = None
        target, now_bias, now_residual, now_flags = out, bias, residual, flags
        if splits > 1:
            parts = target = self.empty((splits, m, n))
            now_bias, now_residual, now_flags = None, None, 0
        rank = u.shape[1] if u is not None else 0
        arguments = [*kernel.operands, target, now_bias, now_residual, u, v, m, n, k, per_split, rank]
        arguments += [_kind(target), *kinds[1:], now_flags | _V_ALONG_RANK * trans_b, float(alpha)]
        if kernel.dense:
            arguments += [Long(m * k), Long(k * n)]
        grid = (-(-n // tile.n), -(-m // tile.m), batch if parts is None else splits)
        work = 2.0 * batch * m * n * k
        self.launch(kernel.source, kernel.name, arguments, grid, threads=tile.threads, work=work)
        if parts is not None:
            groups = self.groups(m * -(-n // 4), 256)
            reduce = [parts, out, bias, residual, m, n, splits, kinds[0], kinds[1], flags]
            self.launch("gemm_f32", "gemm_reduce", reduce, groups, work=4.0 * m * n * (splits + 1))


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def _kind(array: Array | None) -> int:
    return 0 if array is None else _KIND[array.dtype.name]
