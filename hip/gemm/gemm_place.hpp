// A work-group's place in a GEMM: its tile's first row, its batch, and where the rows of A come from.
#pragma once
#include "gemm_epilogue.hpp"

namespace gemm {

// From the work-group's number: (columns, rows, batch or split).
struct OfGrid {
  GPU_FN int row(int tile) const { return gpu::block_y() * tile; }
  GPU_FN int batch() const { return gpu::block_z(); }
  GPU_FN long first_result(const Epilogue& e) const { return (long)batch() * e.m * e.n; }
  template <class Tile> GPU_FN void move(Tile&, int, int, int) const {}
};

}  // namespace gemm
