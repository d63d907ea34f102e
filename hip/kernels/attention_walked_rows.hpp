// The rows that attention's gradient walks over, on their way: memory -> registers -> LDS, by all waves together, 128
// bits at a time. y1 and y2, and for dk and dv lse and delta of their rows.
#pragma once
#include "attention_operands.hpp"
#include "attention_range.hpp"
#include "attention_walk.hpp"

namespace attention {

template <class T, int D, bool KEYS>
struct WalkedRows {
  static constexpr bool PAIRED = Share<D>::PAIRED;
  // Of a tile. LDS has no room for 32 rows of dk's and dv's 256.
  static constexpr int ROWS = !GPU_CDNA || (KEYS && D == 256) ? 16 : D == 64 ? 64 : 32;
  static constexpr bool NARROW = Narrow<T>::YES, LIFTS = NARROW && FLUSHES_HALVES;
  using Y = Tile<ROWS, D, THREADS>;
  // LDS: y1 and y2 twice (of waves in pairs: once), lse and delta of their rows twice.
  static constexpr int BUFFER = 2 * Y::SLOTS, BUFFERS = PAIRED ? 1 : 2, STATS = KEYS ? ROWS / 2 : 0;
  static constexpr int ALL_SLOTS = BUFFERS * BUFFER + 2 * STATS;

  u32x4* lds;
  int wave;
  Y y1, y2;
  float row_lse, row_delta;  // of a row of the next tile
  u32 lift_y2;               // where LIFTS: two float16 powers of two
  float lift_delta;          // dk, dv where LIFTS: the power of two that g has too much

  GPU_FN int rows_at(int buffer) const { return PAIRED ? 0 : buffer * BUFFER; }
  GPU_FN float* stats(int buffer) const { return (float*)(lds + BUFFERS * BUFFER + buffer * STATS); }

  struct Source {
    Walked y1, y2;
    const float *lse, *delta;  // dk, dv: of this batch element, [heads, length]
    int length;
  };
  GPU_FN void fetch1(const Source& from, const Walk& w) {
    y1.load(from.y1.of_head(w.fetched<KEYS>(), D * 2), w.row, uniform_barrier(from.y1.stride));
  }
  // The first wave brings lse and delta of y2's rows.
  GPU_FN void fetch2(const Source& from, const Walk& w) {
    const int head = w.fetched<KEYS>();
    y2.load(from.y2.of_head(head, D * 2), w.row, uniform_barrier(from.y2.stride));
    if (KEYS) {
      const long at = (long)head * from.length;
      const u32 row = u32(gpu::min(w.row + int(fresh_lane() % ROWS), from.length - 1));
      row_lse = (from.lse + at)[row], row_delta = (from.delta + at)[row];
    }
  }
  GPU_FN void put1(int buffer) { y1.store(lds + rows_at(buffer)); }
  GPU_FN void put2(const Source& from, const Walk& w) {
    if (LIFTS) y2.lift(lift_y2);
    y2.store(lds + rows_at(w.now) + Y::SLOTS);
    if (KEYS && wave == 0) {
      const u32 row = fresh_lane() % ROWS, in_tile = row % 16;
      // In the order in which lanes hold rows of a result: a lane's lie together.
      const u32 place = row - in_tile + (GPU_RDNA3 ? in_tile % 2 * 8 + in_tile / 2 : in_tile);
      const bool there = w.row + int(row) < from.length;
      stats(w.now)[place] = there ? (NARROW ? float(P_SHIFT) : 0.f) - row_lse * LOG2E : -NOTHING;
      stats(w.now)[place + ROWS] = there ? -(LIFTS ? row_delta * lift_delta : row_delta) : 0.f;
    }
  }
  // Stats of the rows that a lane has of a result.
  GPU_FN static Acc stats_of(const float* rows) {
    const float* mine = rows + fresh_lane() / 16 * ELEMENTS;
    Acc x;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e += 4) {
      const gpu::f32x4 v = gpu::load16<gpu::f32x4>(mine + e);
#pragma unroll
      for (int i = 0; i < 4; i++) x[e + i] = v[i];
    }
    return x;
  }
};

}  // namespace attention
