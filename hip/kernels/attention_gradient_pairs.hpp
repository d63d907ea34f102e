// The loop of attention's gradient on RDNA, heads of 256: two neighbouring waves have the same columns, and a half of
// the width each. attention_gradient.hpp says what is what.
//
//     y1, y2 tile t + 1: memory -> registers -> LDS when all have read tile t (attention_walked_rows.hpp)
//     y1, y2 tile t:     LDS -> operand A twice: along the head width, and transposed in registers
//     x1, x2:            operand B, in LDS
#pragma once
#include "attention_gradient_columns.hpp"
#include "attention_gradient_rdna.hpp"
#include "attention_pairs.hpp"
#include "attention_walked_rows.hpp"

namespace attention {

// The owned rows of a wave as operand B, in LDS.
template <int D>
struct Held {
  using S = Share<D>;
  using Owned = Tile<S::COLUMNS, D, THREADS>;
  static constexpr int SLOTS = Owned::SLOTS;
  u32 at;  // bytes in LDS, of the wave's
  GPU_FN void load(const char* slice, const Mask& mask, int column0, u32 stride, u32x4* lds, int slot) {
    Owned tile;
    tile.load(Rows(slice, u32(mask.queries - 1) * stride + D * 2), column0, stride);
    tile.store(lds + slot);
    at = u32(slot) * 16 + u32(S::place()) * (S::WAVE_COLUMNS * D * 2);
  }
  GPU_FN Chunk read(const u32x4* lds, u32 along, int step) const { return read_along(lds, along + at, step); }
};

template <class T, bool KEYS>
struct Gradient<T, 256, KEYS> : WalkedRows<T, 256, KEYS>, GradientColumns<T, 256, KEYS> {
  static constexpr int D = 256;
  using S = Share<D>;
  using Base = WalkedRows<T, D, KEYS>;
  using Columns = GradientColumns<T, D, KEYS>;
  using V = TransposedTile<D>;
  using typename Base::Source, typename Base::Y;
  using Base::ROWS, Base::BUFFER, Base::lds, Base::wave, Base::rows_at, Base::stats, Base::stats_of;
  using Base::fetch1, Base::fetch2, Base::put1, Base::put2;
  using Columns::TILES, Columns::DEPTHS, Columns::PIECES, Columns::result1, Columns::result2, Columns::less_delta;
  using Columns::hide, Columns::probabilities, Columns::score_gradients, Columns::round;
  using Columns::NARROW, Columns::LIFTS;
  // LDS behind the walked rows: what waves hand over, a tile of scores and one of their gradients; x1 and x2.
  static constexpr int HANDED = Base::ALL_SLOTS, HELD = HANDED + 2 * WAVES * HANDED_TILE;
  static constexpr int SLOTS = HELD + 2 * Held<D>::SLOTS;

  Held<D> x1, x2;
  Lanes<D> lanes;

  GPU_FN void load_columns(const char* slice1, const char* slice2, const Mask& mask, int column0, u32 stride) {
    x1.load(slice1, mask, column0, stride, lds, HELD);
    x2.load(slice2, mask, column0, stride, lds, HELD + Held<D>::SLOTS);
  }
  GPU_FN void start(int column0, u32) {
    lanes.start();
    wave = int(gpu::wave());
    this->start_columns(column0);
  }

  // s += y x^T. `at`: bytes from the start of LDS to the rows of y.
  GPU_FN void product(Acc (&s)[TILES], u32 at, const Held<D>& x) {
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int c = 0; c < DEPTHS; c++) {
      s[0] = multiply(T{}, read_along(lds, along + at, c), x.read(lds, along, c), s[0]);
      if (c % 2) gpu::sched_fence();
    }
  }
  GPU_FN void transpose(V& v, u32 at, int part) const {
    v.load(lds, optimization_barrier(lanes.across) + at, part);
  }
  // result^T += y^T b, of one part of y, transposed; and of all of them, with registers for one: part 0 is there.
  GPU_FN static void accumulate_part(Acc (&to)[PIECES][TILES], const V& v, int part, const Piece (&b)[TILES]) {
#pragma unroll
    for (int j = 0; j < V::WIDE; j++) {
      const Piece a = v.piece(j);
#pragma unroll
      for (int n = 0; n < TILES; n++) to[part * V::WIDE + j][n] = mma(T{}, a, b[n], to[part * V::WIDE + j][n]);
    }
  }
  GPU_FN void accumulate(Acc (&to)[PIECES][TILES], V& v, u32 at, const Piece (&b)[TILES]) const {
#pragma unroll
    for (int part = 0; part < V::PARTS; part++) {
      if (part > 0) transpose(v, at, part);
      accumulate_part(to, v, part, b);
      gpu::sched_fence();
    }
  }
  // `which`: of two places in LDS.
  GPU_FN void exchange(Acc& tile, int which) const {
    u32x4* handed = lds + HANDED + which * WAVES * HANDED_TILE;
    hand_over(handed + wave * HANDED_TILE, tile);
    meet();
    add_handed(tile, handed + (wave ^ 1) * HANDED_TILE);
  }
  GPU_FN void step(int buffer, int row0, bool partly) {
    const u32 at1 = u32(rows_at(buffer)) * 16, at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer);
    Acc s[TILES], g[TILES];
    Piece rounded[TILES];
    V v;
    Acc of_row = Acc(0.f);
#pragma unroll
    for (int n = 0; n < TILES; n++) s[n] = Acc(0.f);
    product(s, at1, x1);
    exchange(s[0], 0);
    if constexpr (KEYS) {
      gpu::sched_fence();
      if (partly) hide(s, row0);
      of_row = stats_of(rows);
      probabilities(s, of_row);
      round(rounded, s);
      gpu::sched_fence();
      transpose(v, at2, 0);
      accumulate(result2, v, at2, rounded);
      gpu::sched_fence();
      of_row = stats_of(rows + ROWS);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      g[n] = KEYS ? of_row : Acc(optimization_barrier(less_delta[n]));
      if (S::first_element() > 0) g[n] = Acc(0.f);  // -delta counts once
    }
    product(g, at2, x2);
    exchange(g[0], 1);
    gpu::sched_fence();
    if (!KEYS && partly) hide(s, row0);
    if (!KEYS) probabilities(s, of_row);
    score_gradients(g, s);
    round(rounded, g);
    gpu::sched_fence();
    transpose(v, at1, 0);
    accumulate(result1, v, at1, rounded);
    gpu::sched_fence();
  }
  // From rows `all` of heads [head, last_head].
  GPU_FN void run(const Source& from, const Span& all, const Span& mine, int head, int last_head) {
    const int begin = all.begin / ROWS * ROWS;
    Walk w{begin, head, begin, all.end, last_head, 0};
    fetch1(from, w);
    fetch2(from, w);
    put1(0);
    put2(from, w);
    gpu::lds_barrier();
#pragma unroll 1
    while (!w.over()) {
      Walk next = w;
      next.template step<ROWS>();
      fetch1(from, next);
      fetch2(from, next);
      gpu::sched_fence();
      if (mine.touches(w.row, ROWS)) step(w.now, w.row, !mine.whole(w.row, ROWS));
      else meet(), meet();
      gpu::sched_fence();
      meet();  // all have read what is overwritten
      put1(next.now);
      put2(from, next);
      gpu::lds_barrier();
      w = next;
    }
  }
  template <class Out>
  GPU_FN static void store(const Acc (&x)[PIECES][TILES], const float (&factor)[TILES], Out* to, int column0,
                           int columns, long stride) {
    Columns::template store_in_order<V>(x, factor, to, column0, columns, stride);
  }
};

}  // namespace attention
