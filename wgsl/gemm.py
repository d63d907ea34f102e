"""Matrix products: dense and NF4 weights, forward and backward, from one tiled shader (gemm.wgsl)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl import gemm_matrix
from wgrad.wgsl.gemm_matrix import MatrixTile
from wgrad.wgsl.nf4 import ROUNDING
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_KIND = {"float32": 0, "float16": 1, "bfloat16": 2}
NF4_KIND = 3


@dataclass(frozen=True)
class Tile:
    """A workgroup's tile of the result, and the 4 x 4 blocks (tm4 x tn4) that a thread owns of it."""

    m: int
    n: int
    k: int
    tm4: int
    tn4: int

    @property
    def threads(self) -> int:
        return (self.m // 4 // self.tm4) * (self.n // 4 // self.tn4)

    @property
    def workgroup_bytes(self) -> int:
        return (self.m + self.n) * self.k * 4 + 64


# Measured on an H100 (bench/bench_gemm.py --sweep): 128 x 64 is best or within a few percent of it for every shape of
# the 135M, 1B and 8B models; 128 x 128 leaves too few workgroups to hide latency (docs/rejected.md).
MAIN = Tile(128, 64, 16, 2, 2)
SMALL = Tile(32, 32, 16, 1, 1)
TALL_SKINNY = Tile(64, 16, 16, 1, 1)  # LoRA: N = rank
FLAT_SKINNY = Tile(16, 64, 16, 1, 1)  # LoRA: M = rank; decoding: M = 1


def software_tile(m: int, n: int) -> Tile:
    """On software drivers: no workgroup memory, 16 x 16 results an invocation (fewer reads a multiplication)."""
    return Tile(16 if m <= 16 else 128, 16 if n <= 16 else 128, 4, 4, 4)


# WebGPU does not tell how many workgroups a card runs at once. Products of fewer tiles than _FEW_TILES are split over K
# until there are about _WANTED_GROUPS, which fills the largest cards and costs small ones only the second pass.
_FEW_TILES, _WANTED_GROUPS, _WANTED_SKINNY_GROUPS = 300, 800, 288
_MIN_K_PER_SPLIT, _MIN_K_PER_SKINNY_SPLIT = 144, 64
_MAX_SPLITS, _MAX_SKINNY_SPLITS = 32, 16


def choose_tile(m: int, n: int, k: int, batch: int = 1) -> tuple[Tile, int]:
    """Tile and number of splits of K."""
    if min(m, n) <= 16:
        tile = TALL_SKINNY if n <= 16 else FLAT_SKINNY
        if batch > 1:
            return tile, 1
        splits = min(round(_WANTED_SKINNY_GROUPS / _count(m, n, tile)), k // _MIN_K_PER_SKINNY_SPLIT)
        return tile, max(1, min(splits, _MAX_SKINNY_SPLITS))
    tile = SMALL if min(m, n) <= 32 else MAIN
    tiles = _count(m, n, tile) * batch
    if batch > 1 or tiles >= 2 * _FEW_TILES:
        return tile, 1
    if tiles >= _FEW_TILES:
        return tile, 2 if k >= 2048 else 1
    return tile, max(1, min(round(_WANTED_GROUPS / tiles), k // _MIN_K_PER_SPLIT, _MAX_SPLITS))


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def _loads(elements: int, threads: int) -> int:
    return -(-elements // threads)


class GemmOps(Runtime):
    """gemm, linear_nf4, linear_nf4_backward (device/contract.py)."""

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
        shape = (batch, m, n) if len(a.shape) == 3 else (m, n)
        if out is None:
            out = self.empty(shape, a.dtype if dtype is None else dtype)
        if trans_b and batch == 1 and b.nbytes > self.max_binding_bytes:
            for lo, hi in self.row_windows(n, k * b.dtype.itemsize):
                part = self.view(b, (hi - lo, k), lo * k)
                self._product(
                    a, part, out, (m, hi - lo, k), batch, trans_a, True, alpha, bias, residual, lowrank, accumulate,
                    column=lo, ldc=n,
                )  # fmt: skip
            return out
        self._product(a, b, out, (m, n, k), batch, trans_a, trans_b, alpha, bias, residual, lowrank, accumulate)
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
        out = self.empty((m, n), x.dtype if dtype is None else dtype)
        if k % 8 or self.software:
            # A row would start inside a 32-bit word of codes; or decoding once is cheaper than once a tile.
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(x, w, trans_b=True, bias=bias, residual=residual, lowrank=lowrank, out=out)
        self._product(x, weight, out, (m, n, k), 1, False, True, 1.0, bias, residual, lowrank, False)
        return out

    def linear_nf4_backward(
        self, dy: Array, weight: Any, *, lowrank: tuple[Array, Array] | None = None, dtype: Any = None
    ) -> Array:
        (m, n), k = dy.shape, weight.shape[1]
        out = self.empty((m, k), dy.dtype if dtype is None else dtype)
        if k % 8 or self.software:
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(dy, w, lowrank=lowrank, out=out)
        self._product(dy, weight, out, (m, k, n), 1, False, False, 1.0, None, None, lowrank, False)
        return out

    def _product(
        self,
        a: Array,
        b: Any,
        out: Array,
        mnk: tuple[int, int, int],
        batch: int,
        trans_a: bool,
        trans_b: bool,
        alpha: float,
        bias: Array | None,
        residual: Array | None,
        lowrank: tuple[Array, Array] | None,
        accumulate: bool,
        *,
        column: int = 0,
        ldc: int | None = None,
        a_column: int = 0,
        lda: int | None = None,
        tile: Tile | MatrixTile | None = None,
        splits: int | None = None,
    ) -> None:
        """One product into `out` (its columns from `column` on, row stride `ldc`); `a` likewise."""
        m, n, k = mnk
        lda = lda or (m if trans_a else k)
        ldc = ldc or n
        chosen: tuple[Tile | MatrixTile, int] = choose_tile(m, n, k, batch)
        if self.matrix_units and a_column % 8 == 0 and gemm_matrix.served(a, b, out, mnk, trans_a, trans_b, lda):
            chosen = gemm_matrix.choose_tile(m, n, k, batch, self.workgroup_bytes, self.matrix_tile)
        tile, splits = tile or chosen[0], splits or chosen[1]
        if self.software and isinstance(b, Array):
            tile, splits = software_tile(m, n), 1
        nf4 = not isinstance(b, Array)
        vec_c = n % 4 == 0 and ldc % 4 == 0 and column % 4 == 0
        if isinstance(tile, MatrixTile):
            shader, constants = "gemm_matrix", tile.constants(a, b, trans_a, trans_b, _kinds(a, b), k, out)
            constants["ROUND"] = _rounding(b)
        else:
            shader, constants = "gemm", self._constants(tile, a, b, trans_a, trans_b, mnk)
            constants["VEC_A"] = lda % 4 == 0 and a_column % 4 == 0
        epilogue: dict[str, Constant] = {
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "ACCUMULATE": accumulate,
            "C_T": _scalar(out, vec_c),
            "R_T": _scalar(residual if residual is not None else out, vec_c),
            "VEC_C": vec_c,
        }
        if splits > 1:
            target = self.empty((splits, m, n))
            now: dict[str, Constant] = {**dict.fromkeys(epilogue, False), "VEC_C": n % 4 == 0}
            now |= {"C_T": "vec4<f32>" if n % 4 == 0 else "f32", "R_T": "f32"}
        else:
            target, now = out, epilogue
        k_per_split = -(-k // splits // tile.k) * tile.k if splits > 1 else k
        rank = lowrank[0].shape[1] if lowrank else 0
        u, v = lowrank or (None, None)
        arrays = [a, b.packed if nf4 else b, target, bias, residual, u, v]
        if nf4:
            arrays += [b.absmax, b.nested_absmax, b.nested_code, b.nested_offset]
        self.launch(
            shader,
            arrays,
            [m, n, k, k_per_split, ldc, column, rank, getattr(b, "block_size", 0)]
            + [getattr(b, "nested_block_size", 0), lda, a_column, 0, float(alpha)],
            (-(-n // tile.n), -(-m // tile.m), batch if splits == 1 else -(-k // k_per_split)),
            {**constants, **now, "SPLIT": splits > 1, "HAS_LOWRANK": lowrank is not None},
            work=2.0 * batch * m * n * k,
        )
        if splits > 1:
            self._reduce_splits(target, out, bias, residual, epilogue, (m, n, -(-k // k_per_split)), ldc, column, alpha)

    def _constants(
        self, tile: Tile, a: Array, b: Any, trans_a: bool, trans_b: bool, mnk: tuple[int, int, int]
    ) -> dict[str, Constant]:
        m, n, k = mnk
        nf4 = not isinstance(b, Array)
        b_elements = tile.n * tile.k // (8 if nf4 else 4)
        return {
            "TILE_M": tile.m,
            "TILE_N": tile.n,
            "TILE_K": tile.k,
            "DIRECT": self.software and not nf4,
            "TM4": tile.tm4,
            "TN4": tile.tn4,
            "ACC_ROWS": 4 * tile.tm4,
            "LOADS_A": _loads(tile.m * tile.k // 4, tile.threads),
            "LOADS_B": _loads(b_elements, tile.threads),
            "TRANS_A": trans_a,
            "TRANS_B": trans_b,
            "A_KIND": _kinds(a, b)[0],
            "B_KIND": _kinds(a, b)[1],
            "NESTED": nf4 and b.nested_absmax is not None,
            "ROUND": _rounding(b),
            "VEC_B": (k if trans_b else n) % 4 == 0,
        }

    def _reduce_splits(
        self,
        partial: Array,
        out: Array,
        bias: Array | None,
        residual: Array | None,
        epilogue: dict[str, Constant],
        mns: tuple[int, int, int],
        ldc: int,
        column: int,
        alpha: float,
    ) -> None:
        m, n, splits = mns
        vec = bool(epilogue["VEC_C"])
        width = 4 if vec else 1
        self.launch(
            "gemm_reduce",
            [partial, out, bias, residual],
            [m, n, splits, ldc, column, float(alpha)],
            self.groups(m * n // width, 256),
            {**epilogue, "P_T": "vec4<f32>" if vec else "f32", "WIDTH": width},
            work=4.0 * m * n * (splits + 1),
        )


def _kinds(a: Array, b: Any) -> tuple[int, int]:
    return _KIND[a.dtype.name], _KIND[b.dtype.name] if isinstance(b, Array) else NF4_KIND


def _rounding(b: Any) -> int:
    return 0 if isinstance(b, Array) else ROUNDING[b.value_dtype]


def _scalar(array: Array, vec: bool) -> str:
    name = "f16" if array.dtype == np.float16 else "f32"
    return f"vec4<{name}>" if vec else name
