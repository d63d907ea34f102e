// Loads the rows that attention's gradient walks over on CDNA: memory -> registers -> LDS, by all waves together, 128
// bits at a time. y1 and y2, and for dk and dv lse and delta of their rows.
#pragma once
#include "attention_operands.hpp"
#include "attention_walk.hpp"

namespace attention {

template <class T, int D, bool KEYS>
struct WalkedRows {
  // Rows of a tile. For dk and dv with heads of 256, 32 rows do not fit LDS.
  static constexpr int ROWS = KEYS && D == 256 ? 16 : D == 64 ? 64 : 32;
  static constexpr bool NARROW = Narrow<T>::YES, LIFTS = NARROW && FLUSHES_HALVES;
  using Y = Tile<ROWS, D, THREADS>;
  // LDS: y1 and y2 twice, lse and delta of their rows twice.
  static constexpr int BUFFER = 2 * Y::SLOTS, STATS = KEYS ? ROWS / 2 : 0, ALL_SLOTS = 2 * BUFFER + 2 * STATS;

  u32x4* lds;
  int wave;
  Y y1, y2;
  RowStats<T, ROWS, LIFTS> of_rows;  // of the next tile
  u32 lift_y2;                       // where LIFTS: two float16 powers of two
  float lift_delta;                  // dk, dv where LIFTS: the power of two by which g is too large

  GPU_FN float* stats(int buffer) const { return (float*)(lds + 2 * BUFFER + buffer * STATS); }

  GPU_FN void fetch1(const Source& from, const Walk& w) {
    y1.load(from.y1.of_head(w.fetched<KEYS>(), D * 2), w.row, uniform_barrier(from.y1.stride));
  }
  // The first wave loads lse and delta of y2's rows.
  GPU_FN void fetch2(const Source& from, const Walk& w) {
    const int head = w.fetched<KEYS>();
    y2.load(from.y2.of_head(head, D * 2), w.row, uniform_barrier(from.y2.stride));
    if (KEYS) of_rows.fetch(from, head, w.row);
  }
  GPU_FN void put1(int buffer) { y1.store(lds + buffer * BUFFER); }
  GPU_FN void put2(const Source& from, const Walk& w) {
    if (LIFTS) y2.lift(lift_y2);
    y2.store(lds + w.now * BUFFER + Y::SLOTS);
    if (KEYS && wave == 0) of_rows.put(stats(w.now), w.row, from.length, lift_delta);
  }
};

}  // namespace attention
