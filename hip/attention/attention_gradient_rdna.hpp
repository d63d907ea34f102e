// The loop of attention's gradient on RDNA, heads of 64 and 128. attention_gradient.hpp defines the names. As in the
// forward, a wave does one thing after the other, and the others of its SIMD hide what it waits for.
//
//     y1, y2 tile t + 2: memory -> registers in tile t: when it begins where there are registers for it, between its
//                        halves where not
//     y1, y2 tile t + 1: registers -> LDS buffer (t + 1) % 2 when tile t begins, along and across
//                        (attention_walked_twice.hpp); one barrier per tile
//     y1, y2 tile t:     LDS buffer t % 2 -> operand A of s and of g, of dv and of dq or dk, each read ahead
//     x1, x2:            operand B, in registers as far as these go, the rest in LDS
//
// A tile's first half ends with p and ds as operands: computing ds hides p's exchange through LDS, and the matmuls of
// dv hide that of ds.
#pragma once
#include "attention_gradient_columns.hpp"
#include "attention_walked_twice.hpp"

namespace attention {

// How many chunks of x1 and x2 a wave keeps in registers; the others are read from LDS, whose bandwidth is as scarce as
// registers.
template <int D, bool KEYS>
struct Kept {
  static constexpr int X1 = D == 64 ? 4 : KEYS ? 4 : 8, X2 = D == 64 ? 4 : KEYS ? 0 : 4;
};
template <bool KEYS>
struct Kept<256, KEYS> {  // of half of the width
  static constexpr int X1 = KEYS ? 0 : 8, X2 = 0;
};

// The owned rows of a wave as operand B: KEPT chunks of its width in registers, the rest in LDS from byte AT on.
template <int D, int KEPT, u32 AT>
struct Columns16 {
  using S = Share<D>;
  static constexpr int REST = D - DEPTH * KEPT * S::HALVES, COLUMNS = S::COLUMNS, BYTES = COLUMNS * REST * 2;
  static_assert(!S::PAIRED || REST == 0 || KEPT == 0, "a half of the width is in one place");
  Chunk at[KEPT > 0 ? KEPT : 1];
  u32 along;  // in LDS: where a lane's row begins, from AT on
  GPU_FN void load(const char* slice, const Mask& mask, int column0, u32 stride, u32x4* lds) {
    const u32 half = S::first_element() * 2;
    const char* mine = slice + (long)mask.clamp(column0 + 16 * S::place() + column()) * stride + half;
#pragma unroll
    for (int s = 0; s < KEPT; s++) at[s] = chunk(s, [&](int c) { return gpu::load16(mine + 16 * c); });
    if constexpr (REST > 0) {
      Tile<COLUMNS, REST, THREADS> tile;
      tile.load(Rows(slice + 32 * KEPT, u32(mask.queries - 1) * stride + REST * 2), column0, stride);
      tile.store(lds + AT / 16);
      along = own_along<REST>(u32(16 * S::place() + column())) + half;
    }
  }
  GPU_FN Chunk read(const u32x4* lds, int step) const {
    return step < KEPT ? at[step] : read_along(lds, optimization_barrier(along), step - KEPT, AT);
  }
};

// What both loops have: operands in flight, and matmuls.
template <class T, int D, bool KEYS>
struct GradientProducts : WalkedTwice<T, D, KEYS>, GradientColumns<T, D, KEYS> {
  using Base = WalkedTwice<T, D, KEYS>;
  using Columns = GradientColumns<T, D, KEYS>;
  using Base::ROWS, Base::BYTES, Base::lds;
  using Columns::TILES, Columns::PIECES, Columns::NARROW, Columns::LIFTS, Columns::result1, Columns::result2;
  using Across = AcrossTile<Share<D>::WIDTH>;
  static constexpr int PARTS = ROWS / 16, OF = PARTS * PIECES;  // operands of a matmul
  static constexpr int OPERANDS = (KEYS ? 4 : 3) * OF;          // of a tile: of s, of g, of dv, of dq or dk
  static constexpr int READS = 2;                               // of them in flight from LDS
  static constexpr int SCORE_READS = Base::TURNS ? 1 : READS;   // with the scores: of y and of x
  using X1 = Columns16<D, Kept<D, KEYS>::X1, Base::WALKED_BYTES>;
  using X2 = Columns16<D, Kept<D, KEYS>::X2, Base::WALKED_BYTES + X1::BYTES>;
  static constexpr u32 END = Base::WALKED_BYTES + X1::BYTES + X2::BYTES;
  static_assert(TILES == 1 && (PARTS == 1 || X1::REST + X2::REST == 0), "what is in LDS is read once a tile");

  X1 x1;
  X2 x2;
  u32 along, across;  // in LDS: where a lane's row of 16 begins
  Piece operand[READS + 1];
  Chunk of_x[READS + 1];  // of x1, then of x2

  GPU_FN void load_columns(const char* slice1, const char* slice2, const Mask& mask, int column0, u32 stride) {
    x1.load(slice1, mask, column0, stride, lds);
    x2.load(slice2, mask, column0, stride, lds);
  }
  // stride: of the walked rows.
  GPU_FN void start(int column0, u32 stride) {
    const u32 half = u32(Share<D>::first_element());
    along = own_along<D>(u32(column())) + half * 2, across = Across::own() + half * Across::ROW;
    this->start_walked(stride);
    this->start_columns(column0);
  }

  // Where a lane's rows begin in a buffer.
  struct Own {
    u32 along, across;
  };
  GPU_FN Own own_rows(const Walk& w) const {
    return {along + u32(w.now) * Base::APART, across + u32(w.now) * Base::APART_ACROSS};
  }
  // The n-th operand A of a tile, and the n-th of x1, then x2.
  GPU_FN void read(const Own& own, int n) {
    if (n >= OPERANDS) return;
    const int product = n / OF, i = n % PIECES;
    const u32 part = u32(n % OF / PIECES) * (32 * D);
    Piece& to = operand[n % (READS + 1)];
    if (product < 2) {
      to = read_along(lds, own.along, i, part + u32(product) * BYTES).at[0];
    } else {
      const u32 matrix = KEYS && product == 2 ? Base::ACROSS2 : Base::ACROSS1;
      to = Across::read(lds, own.across, matrix + part, i);
    }
  }
  GPU_FN void read_x(int n) {
    if (n < 2 * OF) of_x[n % (READS + 1)] = n < OF ? x1.read(lds, n % PIECES) : x2.read(lds, n % PIECES);
  }
  // s = y1 x1^T, or (WHICH 1) g += y2 x2^T; of waves in pairs g = y2 x2^T. `later`: near its end, reads what comes
  // after it.
  template <int WHICH, class F>
  GPU_FN void scores(Acc (&s)[PARTS][TILES], const Own& at, F later) {
    const Own own{optimization_barrier(at.along), at.across};
#pragma unroll
    for (int c = 0; c < OF; c++) {
      const int n = WHICH * OF + c;
      if (!Base::TURNS || n + SCORE_READS < 2 * OF) read(own, n + SCORE_READS);
      read_x(n + SCORE_READS);
      if (c == OF - 2 + WHICH) later();
      Acc& to = s[c / PIECES][0];
      const bool from_zero = (WHICH == 0 || Base::PAIRED) && c % PIECES == 0;
      if (from_zero) to = optimization_barrier(Acc(0.f));
      to = mma(T{}, operand[n % (READS + 1)], of_x[n % (READS + 1)].at[0], to);
      gpu::sched_fence();
    }
    // Here, and not behind the branch around hide().
#pragma unroll
    for (int y = 0; y < PARTS; y++) s[y][0] = optimization_barrier(s[y][0]);
  }
  // result^T += y^T b.
  template <int PRODUCT>
  GPU_FN void accumulate(Acc (&to)[PIECES][TILES], const Own& own, const Piece (&b)[PARTS][TILES]) {
#pragma unroll
    for (int c = 0; c < OF; c++) {
      const int n = PRODUCT * OF + c, i = c % PIECES;
      read(own, n + READS);
      to[i][0] = mma(T{}, operand[n % (READS + 1)], b[c / PIECES][0], to[i][0]);
      gpu::sched_fence();
    }
  }
  GPU_FN void add_to_results(const Own& own, const Piece (&p)[PARTS][TILES], const Piece (&ds)[PARTS][TILES]) {
    if constexpr (KEYS) accumulate<2>(result2, own, p);
    accumulate<KEYS ? 3 : 2>(result1, own, ds);
  }
  // p and ds, of 16 rows, from scores and what their gradients are made of.
  GPU_FN void second_operands(Piece (&p)[TILES], Piece (&ds)[TILES], Acc (&s)[TILES], Acc (&g)[TILES],
                              const Acc& of_row) const {
    this->probabilities(s, of_row);
    if (KEYS) this->round(p, s);
    this->score_gradients(g, s);
    this->round(ds, g);
  }
  GPU_FN void first_operands(const Own& own) {
#pragma unroll
    for (int n = 0; n < SCORE_READS; n++) read(own, n), read_x(n);
    gpu::sched_fence();
  }
  template <class Out>
  GPU_FN static void store(const Acc (&x)[PIECES][TILES], const float (&factor)[TILES], Out* to, int column0,
                           int columns, long stride) {
    Columns::template store_in_order<Across>(x, factor, to, column0, columns, stride);
  }
};

template <class T, int D, bool KEYS>
struct Gradient : GradientProducts<T, D, KEYS> {
  using Base = GradientProducts<T, D, KEYS>;
  using typename Base::Own;
  using Base::ROWS, Base::PARTS, Base::TILES, Base::fetch;
  static constexpr bool ROOM = D == 64;  // registers for y while scores are computed
  static constexpr int SLOTS = Base::END / 16;

  GPU_FN void put(const Source& from, const Walk& w) { this->put_along(from, w), this->put_across(w); }
  // Up to p and ds.
  GPU_FN void first_half(Piece (&p)[PARTS][TILES], Piece (&ds)[PARTS][TILES], const Own& own, const Walk& w,
                         bool partly) {
    Acc s[PARTS][TILES], g[PARTS][TILES], of_row[PARTS];
    const auto each = [](auto what) {
#pragma unroll
      for (int y = 0; y < PARTS; y++) what(y);
    };
    each([&](int y) { of_row[y] = Acc(0.f); });
    this->template scores<0>(s, own, [&] { each([&](int y) { if (KEYS) g[y][0] = this->stats(w, 1, y); }); });
    if (!KEYS) each([&](int y) { g[y][0] = Acc(optimization_barrier(this->less_delta[0])); });
    this->template scores<1>(g, own, [&] { each([&](int y) { if (KEYS) of_row[y] = this->stats(w, 0, y); }); });
    each([&](int y) {
      if (partly) this->hide(s[y], w.row + 16 * y);
    });
    each([&](int y) { this->second_operands(p[y], ds[y], s[y], g[y], of_row[y]); });
    gpu::sched_fence();
  }
  // From rows `all` of heads [head, last_head].
  GPU_FN void run(const Source& from, const Span& all, const Span& mine, int head, int last_head) {
    const int begin = all.begin / ROWS * ROWS;
    Walk w{begin, head, begin, all.end, last_head, 0};
    fetch(from, w);
    put(from, w);
    Walk next = w;
    next.template step<ROWS>();
    fetch(from, next);
    gpu::lds_barrier();
#pragma unroll 1
    while (!w.over()) {
      Walk after = next;
      after.template step<ROWS>();
      const Own own = this->own_rows(w);
      const bool touched = mine.touches(w.row, ROWS);
      Piece p[PARTS][TILES], ds[PARTS][TILES];
      this->first_operands(own);
      put(from, next);
      if (ROOM) fetch(from, after);
      gpu::sched_fence();
      if (touched) first_half(p, ds, own, w, !mine.whole(w.row, ROWS));
      if (!ROOM) fetch(from, after);
      gpu::sched_fence();
      if (touched) this->add_to_results(own, p, ds);
      gpu::sched_fence();
      gpu::lds_barrier();  // tile t is read, tile t + 1 is there
      w = next, next = after;
    }
  }
};

}  // namespace attention
