// GEMMs of experts: rows are grouped by expert, and each tile of the result belongs to one expert.
//
//     rows start[e] .. start[e + 1] - 1 of A [S, K]  x  weight e of B [E, ...]  ->  the same rows of C [S, N]
//
// An expert's last tile may be partial, so there are at most S / TILE_M + E tiles. The host does not know how many: it
// launches that many work-groups, and each finds its tile in `start`, where a wave's lanes count the tiles of as many
// experts at once. Row s of C uses row s of A, or with an `order` the row of its token: order[s] / chosen.
#pragma once
#include "gemm_place.hpp"

namespace gemm {

constexpr int HAS_RESIDUAL = 16;  // in addition to the flags of gemm_epilogue.hpp

struct OfExpert {
  const int* order;  // null: the rows of A are those of C
  unsigned chosen;   // experts of a token
  int expert, first, rows, row0;  // the expert, its first row, how many it has, and the tile's first row of them

  // Tile `tile` of all; false: there are not so many.
  GPU_FN bool find(const int* start, int experts, int tile_rows, int tile) {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < experts; base += GPU_WAVE) {
      const int lane = gpu::lane(), e = base + lane < experts ? base + lane : experts - 1;
      const int begin = start[e], count = start[e + 1] - begin;
      const int tiles = base + lane < experts ? (count + tile_rows - 1) / tile_rows : 0;
      int sum = tiles;  // of this lane and those before it
#pragma unroll
      for (int step = 1; step < GPU_WAVE; step *= 2) {
        const int other = gpu::shuffle(sum, (lane - step) & (GPU_WAVE - 1));
        sum += lane >= step ? other : 0;
      }
      const int here = tile - before, total = gpu::lane_value(sum, GPU_WAVE - 1);
      if (here < total) {
        const unsigned mine = here < sum && here >= sum - tiles ? lane : 0u;
        const unsigned owner = gpu::uniform(gpu::wave_reduce(mine, gpu::Max{}));
        expert = base + owner;
        first = gpu::lane_value(begin, owner);
        rows = gpu::lane_value(count, owner);
        row0 = (here - gpu::lane_value(sum - tiles, owner)) * tile_rows;
        return true;
      }
      before += total;
    }
    return false;
  }
  GPU_FN int row(int) const { return row0; }
  GPU_FN int batch() const { return expert; }
  GPU_FN long first_result(const Epilogue& e) const { return (long)first * e.n; }
  template <class Tile> GPU_FN void move(Tile& a, int m0, int k, int thread) const {
    if (!order) {
      a.origin += (long)first * k;
      return;
    }
    a.origin = 0;
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      const int row = a.row(thread, i), left = rows - m0 - 1;
      a.move_row(i, (unsigned)order[first + m0 + (row < left ? row : left)] / chosen * (unsigned)k, thread);
    }
  }
};

// p [.., n] from row `first` on. Without a test for null, which would turn p's loads into flat ones.
GPU_FN const void* from_row(const void* p, int kind, int first, int n) {
  return (const char*)p + ((long)first * n << (kind == 0 ? 2 : 1));
}

}  // namespace gemm

// The arguments that follow the operands of a GEMM of experts; chosen: 0 where there is no order.
#define GROUPED_ARGUMENTS                                                                                           \
  const int *start, const int *order, int experts, int chosen, void *c, const void *residual, int n, int k, int c_kind, \
      int residual_kind, int flags, float alpha
#define GROUPED_TILE(rows_of_a_tile)                                                                                \
  gemm::OfExpert where{order, unsigned(chosen), 0, 0, 0, 0};                                                        \
  if (!where.find(start, experts, rows_of_a_tile, gpu::block_y())) return;                                          \
  const gemm::Epilogue e {                                                                                          \
    c, nullptr, gemm::from_row(residual, residual_kind, flags & gemm::HAS_RESIDUAL ? where.first : 0, n), nullptr,  \
        nullptr, where.rows, n, 0, c_kind, residual_kind, 0, 0, flags, alpha                                                                           \
  }
