// The loop of attention's gradient on CDNA, in phases: waves w and w + 4 share a SIMD, and one of them is a phase
// behind the other. attention_gradient.hpp defines the names.
//
//     y1, y2 tile t + 1: memory -> registers -> LDS buffer (t + 1) % 2 (attention_walked_rows.hpp)
//     y1, y2 tile t:     LDS buffer t % 2 -> operand A twice: along the head width, and transposed in registers
//     x1, x2:            operand B, in registers from start to end
#pragma once
#include "attention_gradient_columns.hpp"
#include "attention_pairs.hpp"
#include "attention_walked_rows.hpp"

namespace attention {

// First address of a lane: reading its row (l % 16) along, or its inner() rows across.
template <int D>
struct Lanes {
  u32 along, across;
  GPU_FN void start() {
    const u32 row = u32(column());
    along = own_along<D>(row);
    const u32 first = u32(inner(0)), byte = row * Transposed<D>::WIDE * 2;
    across = first * (D * 2) + ((byte / 16 ^ swizzle(first)) * 16 + byte % 16);
  }
};
// A of the second matmul, as Transposed from memory.
template <int D>
struct TransposedTile : Transposed<D> {
  using Transposed<D>::WIDE;
  GPU_FN void load(const u32x4* lds, u32 lane_at, int part) {
#pragma unroll
    for (int r = 0; r < INNER; r++) {
      const u32 further = u32(r) * (D * 2) + u32(part) * (32 * WIDE);
      const char* from = (const char*)lds + ((lane_at ^ swizzle(u32(r)) * 16) + further);
      if constexpr (WIDE == 8) {
        const u32x4 v = *(const u32x4*)from;
#pragma unroll
        for (int w = 0; w < 4; w++) this->at[r][w] = v[w];
      } else {
        const u32x2 v = *(const u32x2*)from;
        this->at[r][0] = v[0], this->at[r][1] = v[1];
      }
    }
  }
};

// The owned rows of a wave as operand B.
template <int D>
struct Held {
  using S = Share<D>;
  static constexpr int TILES = S::TILES, DEPTHS = S::WIDTH / DEPTH;
  Chunk at[TILES][DEPTHS];
  GPU_FN void load(const char* slice, const Mask& mask, int column0, u32 stride) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const char* mine = slice + (long)mask.clamp(column0 + S::WAVE_COLUMNS * S::place() + 16 * n + column()) * stride;
#pragma unroll
      for (int s = 0; s < DEPTHS; s++) at[n][s] = chunk(s, [&](int c) { return gpu::load16(mine + 16 * c); });
    }
  }
  GPU_FN void lift(const u32 (&by)[TILES]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int s = 0; s < DEPTHS; s++)
#pragma unroll
        for (int part = 0; part < STEPS; part++) at[n][s].at[part] = lifted(at[n][s].at[part], by[n]);
  }
};

template <class T, int D, bool KEYS>
struct Gradient : WalkedRows<T, D, KEYS>, GradientColumns<T, D, KEYS> {
  using Base = WalkedRows<T, D, KEYS>;
  using Columns = GradientColumns<T, D, KEYS>;
  using V = TransposedTile<D>;
  using typename Base::Y;
  using Base::ROWS, Base::BUFFER, Base::lds, Base::wave, Base::stats;
  using Base::fetch1, Base::fetch2, Base::put1, Base::put2;
  using Columns::TILES, Columns::DEPTHS, Columns::PIECES, Columns::result1, Columns::result2, Columns::less_delta;
  using Columns::hide, Columns::probabilities, Columns::score_gradients, Columns::round;
  using Columns::NARROW, Columns::LIFTS;
  // A tile of ROWS is walked in STEPS_Y steps of PARTS_Y times 16 rows.
  static constexpr int PARTS_Y = D == 64 ? 2 : 1, STEPS_Y = ROWS / (16 * PARTS_Y), CHUNKS = PARTS_Y * DEPTHS;
  static constexpr u32 PART_BYTES = 32 * D, STEP_BYTES = PARTS_Y * PART_BYTES;
  static constexpr bool ROOM = !KEYS || D == 64;  // registers for more loads in flight
  // EARLY_PARTS of y, transposed, are read a phase before they are used; dk and dv of 256 have registers for one.
  static constexpr bool TIGHT = KEYS && V::PARTS > 1;
  static constexpr int EARLY_PARTS = TIGHT ? 1 : V::PARTS;
  static constexpr int LAST_PHASE = KEYS ? 3 : 1, PUT1_PHASE = TIGHT ? 2 : LAST_PHASE;
  // Chunks of y in flight from LDS. With two, clang 22 spills in dk and dv of float16 with heads of 128 for gfx950.
  static constexpr int READS = ROOM ? 3 : GPU_CDNA4 && NARROW && D == 128 ? 1 : 2;
  static constexpr int SLOTS = Base::ALL_SLOTS;

  Held<D> x1, x2;
  Lanes<D> lanes;
  Chunk ahead[CHUNKS];  // of y: the first READS of a matmul are read in the phase before it

  GPU_FN void load_columns(const char* slice1, const char* slice2, const Mask& mask, int column0, u32 stride) {
    x1.load(slice1, mask, column0, stride), x2.load(slice2, mask, column0, stride);
  }
  GPU_FN void start(int column0, u32) {
    lanes.start();
    wave = int(gpu::wave());
    this->start_columns(column0);
  }

  // ---- a step of walked rows ----------------------------------------------------------------------------------------
  // `at`: bytes from the start of LDS to the step's rows of y. Chunk c of them:
  GPU_FN Chunk chunk_of(u32 at, int c) const { return read_along(lds, at + u32(c / DEPTHS) * PART_BYTES, c % DEPTHS); }
  GPU_FN void read_ahead(u32 at) {
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int c = 0; c < READS; c++) ahead[c] = chunk_of(along + at, c);
  }
  // s += y x^T. The first READS chunks were read ahead, and so are here, if MORE, those at `then`.
  template <bool MORE>
  GPU_FN void product(Acc (&s)[PARTS_Y][TILES], u32 at, const Held<D>& x, u32 then) {
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const Chunk a = ahead[c];
      const int next = c + READS;
      if (MORE || next < CHUNKS)
        ahead[next % CHUNKS] = chunk_of(along + (next < CHUNKS ? at : then), next % CHUNKS);
      Acc(&to)[TILES] = s[c / DEPTHS];
#pragma unroll
      for (int n = 0; n < TILES; n++) to[n] = multiply(T{}, a, x.at[n][c % DEPTHS], to[n]);
      gpu::sched_fence();
    }
  }
  GPU_FN void transpose(V& v, u32 at, int part = 0) const {
    v.load(lds, optimization_barrier(lanes.across) + at, part);
  }
  // result^T += y^T b, of one part of y, transposed.
  GPU_FN static void accumulate_part(Acc (&to)[PIECES][TILES], const V& v, int part, const Piece (&b)[TILES]) {
#pragma unroll
    for (int j = 0; j < V::WIDE; j++) {
      const Piece a = v.piece(j);
#pragma unroll
      for (int n = 0; n < TILES; n++) to[part * V::WIDE + j][n] = mma(T{}, a, b[n], to[part * V::WIDE + j][n]);
    }
  }
  // CDNA: waves w and w + 4 share a SIMD, and one of them is a phase behind the other, so that one is in matmuls while
  // the other is at exponentials and reads what its next matmuls need. A phase ends where they meet().
  template <class F>
  GPU_FN static void each(F what) {
#pragma unroll
    for (int y = 0; y < PARTS_Y; y++) what(y);
  }
  // `then`: where the step after this one has its rows of y1. between(phase): done at the start of phase 2 (of
  // dk and dv) and at the end of the last.
  template <class F>
  GPU_FN void phases(int buffer, int i, int row0, bool partly, u32 then, F between) {
    const u32 at1 = u32(buffer) * (BUFFER * 16) + u32(i) * STEP_BYTES, at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer) + i * (16 * PARTS_Y);
    const int first_row = row0 + i * (16 * PARTS_Y);
    Acc s[PARTS_Y][TILES], g[PARTS_Y][TILES], of_row[PARTS_Y];
    Piece rounded[PARTS_Y][TILES];
    V v[PARTS_Y][V::PARTS];
    const auto read = [&](u32 at, u32 next) {
      each([&](int y) {
#pragma unroll
        for (int part = 0; part < EARLY_PARTS; part++) transpose(v[y][part], at + u32(y) * PART_BYTES, part);
      });
      if (ROOM) read_ahead(next);
      gpu::sched_fence();
    };
    each([&](int y) {
#pragma unroll
      for (int n = 0; n < TILES; n++) s[y][n] = Acc(0.f);
    });
    product<!KEYS>(s, at1, x1, at2);
    if constexpr (KEYS) {
      meet();
      each([&](int y) { of_row[y] = stats_of(rows + 16 * y); });
      read(at2, at2);
      each([&](int y) {
        if (partly) hide(s[y], first_row + 16 * y);
        probabilities(s[y], of_row[y]);
        round(rounded[y], s[y]);
      });
      if (!ROOM) read_ahead(at2);
      each([&](int y) { of_row[y] = stats_of(rows + ROWS + 16 * y); });
      meet();
      between(2);
      each([&](int y) {
#pragma unroll
        for (int part = 0; part < EARLY_PARTS; part++) accumulate_part(result2, v[y][part], part, rounded[y]);
      });
      gpu::sched_fence();
      if (TIGHT) transpose(v[0][1], at2, 1);
    }
    each([&](int y) {
#pragma unroll
      for (int n = 0; n < TILES; n++) g[y][n] = KEYS ? of_row[y] : Acc(less_delta[n]);
    });
    product<false>(g, at2, x2, 0);
    if constexpr (TIGHT) accumulate_part(result2, v[0][1], 1, rounded[0]);
    meet();
    read(at1, then);
    each([&](int y) {
      if (!KEYS && partly) hide(s[y], first_row + 16 * y);
      if (!KEYS) probabilities(s[y], Acc(0.f));
      score_gradients(g[y], s[y]);
      round(rounded[y], g[y]);
    });
    if (!ROOM && !TIGHT) read_ahead(then);
    between(LAST_PHASE);
    meet();
    if (TIGHT) transpose(v[0][1], at1, 1), read_ahead(then);
    gpu::sched_fence();
    each([&](int y) {
#pragma unroll
      for (int part = 0; part < V::PARTS; part++) accumulate_part(result1, v[y][part], part, rounded[y]);
    });
    gpu::sched_fence();
  }
  // The same for rows that no column of the wave sees.
  template <class F>
  GPU_FN void idle(u32 then, F between) {
    if (KEYS) {
      meet(), meet();
      between(2);
    }
    meet();
    if (!TIGHT) read_ahead(then);
    between(LAST_PHASE);
    meet();
    if (TIGHT) read_ahead(then);
  }

  // ---- all of them --------------------------------------------------------------------------------------------------
  GPU_FN void tile(const Source& from, Walk& w, const Span& mine) {
    Walk next = w;
    next.template step<ROWS>();
    const bool touched = mine.touches(w.row, ROWS), partly = !mine.whole(w.row, ROWS);
    // Tile t + 1 goes into its buffer when the late waves have read tile t - 1 for the last time: a phase later than
    // the early ones. It is there a phase before the early waves read it first, its y1 in the last phase of tile t.
#pragma unroll
    for (int i = 0; i < STEPS_Y; i++) {
      const bool last = i == STEPS_Y - 1;
      const u32 then = u32(last ? next.now : w.now) * (BUFFER * 16) + (last ? 0 : u32(i + 1) * STEP_BYTES);
      const auto between = [&](int phase) {
        if (i == 0 && phase == PUT1_PHASE) {
          put1(next.now);
          if (ROOM) put2(from, next);
          else fetch2(from, next);  // registers for one matrix in flight at a time
        }
        if (last && phase == LAST_PHASE) {
          Walk after = next;
          after.template step<ROWS>();
          if (!ROOM) put2(from, next);
          if (!TIGHT) fetch1(from, after);
          if (ROOM) fetch2(from, after);
        }
      };
      if (touched) phases(w.now, i, w.row, partly, then, between);
      else idle(then, between);
    }
    if (TIGHT) {  // in flight from one tile to the next, in registers that both branches above would have to copy
      Walk after = next;
      after.template step<ROWS>();
      fetch1(from, after);
    }
    w = next;
  }
  // From rows `all` of heads [head, last_head].
  GPU_FN void run(const Source& from, const Span& all, const Span& mine, int head, int last_head) {
    const int begin = all.begin / ROWS * ROWS;
    const bool late = wave >= WAVES / 2;
    Walk w{begin, head, begin, all.end, last_head, 0};
    fetch1(from, w);
    fetch2(from, w);
    put1(0);
    put2(from, w);
    Walk next = w;
    next.template step<ROWS>();
    fetch1(from, next);
    if (ROOM) fetch2(from, next);
    gpu::lds_barrier();
    if (late) gpu::lds_barrier();
    read_ahead(0);
#pragma unroll 1
    while (!w.over()) tile(from, w, mine);
    if (!late) gpu::lds_barrier();
  }
  template <class Out>
  GPU_FN static void store(const Acc (&x)[PIECES][TILES], const float (&factor)[TILES], Out* to, int column0,
                           int columns, long stride) {
    Columns::template store_in_order<V>(x, factor, to, column0, columns, stride);
  }
};

}  // namespace attention
