"""Tiles that are small enough for a software driver."""

from __future__ import annotations

from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_lora, gemm_matrix_skinny
from wgrad.wgsl.gemm.gemm_tile import Tile

# Of the tile of most GEMMs without tensor cores, an invocation owns a quarter of what it owns on a GPU.
QUICK_MAIN = Tile(32, 32, 8, 1, 1)

# The same code in sizes that a software driver compiles soon: subgroups side by side, and groups of columns.
SMALL_LARGE = gemm_matrix.MatrixTile(2, 1, 1, 2, 1, ahead=True)
SMALL_MEDIUM = gemm_matrix.MatrixTile(1, 2, 1, 1, 1)
SMALL_EXPERTS = gemm_matrix.MatrixTile(1, 2, 2, 1, 1, ahead=True, shorter=(1,), taller=2)
SMALL_TWO = gemm_matrix.MatrixTile(2, 1, 1, 2, 1)
SMALL_SKINNY = gemm_matrix_skinny.SkinnyTile(4, 2, 1, 32, 2)
SMALL_LORA = gemm_matrix_lora.LoraTile(2, 2, 2, 2, 1)
SMALL_NARROW = gemm_matrix.MatrixTile(1, 2, 1, 1, 1, 64, ahead=True, scales_inside=False)
SMALL_FEW = gemm_matrix.MatrixTile(1, 2, 2, 1, 1, 64, ahead=True, scales_inside=False)
