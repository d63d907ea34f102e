// The gradient of attention, block by block: what attention_backward_dq.hip and attention_backward_dkv.hip share.
//
// A work-group owns COLUMNS rows of one side (dq: queries; dk and dv: keys) and walks over the other side's rows, ROWS
// at a time. With x the owned rows and y the walked ones (operands of the scores: x1, y1 = q and k; of their
// gradients: x2, y2 = do and v), a wave has 16 TILES owned rows as columns of every product:
//
//     s = y1 x1^T        p = exp(scale s - lse)       result1^T += y1^T ds    (dq^T = k^T ds, or dk^T = q^T ds)
//     g = y2 x2^T        ds = p (g - delta)           result2^T += y2^T p     (dv^T = do^T p; not for dq)
//
//     y1, y2 tile t + 1: memory -> registers -> LDS buffer (t + 1) % 2, by all waves together, 128 bits at a time
//     y1, y2 tile t:     LDS buffer t % 2 -> operand A twice: along the head width, and transposed in registers
//     x1, x2:            operand B, from start to end: in registers (CDNA), in LDS (RDNA)
//     p, ds:             leave the matrix unit as operand B of the next product (attention_matrix.hpp)
//
// CDNA goes through a step in phases, half of the waves one phase behind the other half (phases()). attention.md draws
// it; attention_walk.hpp has the mask, attention_range.hpp float16's range.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#pragma once
#include "attention_operands.hpp"
#include "attention_range.hpp"
#include "attention_walk.hpp"

namespace attention {

constexpr float LOG2E = 1.4426950408889634f, NOTHING = 1e30f;  // a lse that leaves no probability

// x is the same in all lanes: into a scalar register.
GPU_FN float uniform(float x) { return gpu::bits_to_float(gpu::uniform(gpu::float_to_bits(x))); }
GPU_FN int uniform(int x) { return int(gpu::uniform(u32(x))); }
// The lane's number, found again wherever this stands.
GPU_FN u32 fresh_lane() { return optimization_barrier(gpu::lane()); }

template <class T, int D, bool KEYS>
struct Gradient {
  // A tile of ROWS is walked in STEPS_Y steps of PARTS_Y times 16 rows.
  static constexpr int ROWS = GPU_CDNA ? 4096 / D : 16, PARTS_Y = GPU_CDNA ? 128 / D : 1;
  static constexpr int STEPS_Y = ROWS / (16 * PARTS_Y), DEPTHS = D / DEPTH, CHUNKS = PARTS_Y * DEPTHS, PIECES = D / 16;
  static constexpr u32 PART_BYTES = 32 * D, STEP_BYTES = PARTS_Y * PART_BYTES;
  static constexpr bool NARROW = Narrow<T>::YES, LIFTS = NARROW && FLUSHES_HALVES;
  static constexpr bool ROOM = GPU_CDNA && (!KEYS || D == 64);  // registers for more that is under way
  static constexpr int READS = GPU_CDNA ? (ROOM ? 3 : 2) : 0;   // chunks of y that are on their way from LDS
  using Y = Tile<ROWS, D, THREADS>;
  using V = TransposedTile<D>;
  // LDS: y1 and y2 twice, lse and delta of their rows twice, x1 and x2 where they are held there.
  static constexpr int BUFFER = 2 * Y::SLOTS, STATS = KEYS ? ROWS / 2 : 0;
  static constexpr int SLOTS = 2 * BUFFER + 2 * STATS + 2 * Held<D>::SLOTS;

  u32x4* lds;
  Y y1, y2;
  float row_lse, row_delta;  // of a row of the next tile
  Held<D> x1, x2;
  Lanes<D> lanes;
  Chunk ahead[CHUNKS];             // of y: CDNA reads the first READS of a product in the phase before it
  Acc result1[PIECES][TILES], result2[KEYS ? PIECES : 1][TILES];
  int first[TILES], count[TILES];  // rows that a column sees
  float lse[TILES];                // dq: of the columns
  Splat less_delta[TILES];         // dq: what g starts from, -delta of the columns
  float factor;                    // dk, dv of float16: of ds
  u32 lift_y2;                     // where LIFTS: two float16 powers of two
  float lift_delta;                // dk, dv where LIFTS: the power of two that g has too much
  float scale;                     // of the scores, times log2 e
  int wave, wave_column;  // the wave's first column

  GPU_FN float* stats(int buffer) const { return (float*)(lds + 2 * BUFFER + buffer * STATS); }

  GPU_FN void start(int column0) {
    lanes.start();
    wave = int(gpu::wave()), wave_column = column0 + WAVE_COLUMNS * wave;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        result1[i][n] = Acc(0.f);
        if (KEYS) result2[i][n] = Acc(0.f);
      }
  }

  // ---- the walked rows: memory -> registers, registers -> LDS -------------------------------------------------------
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
  GPU_FN void put1(int buffer) { y1.store(lds + buffer * BUFFER); }
  GPU_FN void put2(const Source& from, const Walk& w) {
    if (LIFTS) y2.lift(lift_y2);
    y2.store(lds + w.now * BUFFER + Y::SLOTS);
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

  // ---- a step of walked rows ----------------------------------------------------------------------------------------
  // `at`: bytes from the start of LDS to the step's rows of y. Chunk c of them:
  GPU_FN Chunk chunk_of(u32 at, int c) const { return read_along(lds, at + u32(c / DEPTHS) * PART_BYTES, c % DEPTHS); }
  GPU_FN void read_ahead(u32 at) {
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int c = 0; c < READS; c++) ahead[c] = chunk_of(along + at, c);
  }
  // s += y x^T. On CDNA the first READS chunks were read ahead, and so are here, if MORE, those at `then`.
  template <bool MORE>
  GPU_FN void product(Acc (&s)[PARTS_Y][TILES], u32 at, const Held<D>& x, u32 then) {
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const Chunk a = GPU_CDNA ? ahead[c] : chunk_of(along + at, c);
      const int next = c + READS;
      if (GPU_CDNA && (MORE || next < CHUNKS))
        ahead[next % CHUNKS] = chunk_of(along + (next < CHUNKS ? at : then), next % CHUNKS);
      Acc(&to)[TILES] = s[c / DEPTHS];
#pragma unroll
      for (int n = 0; n < TILES; n++) to[n] = multiply(T{}, a, x.read(lds, along, n, c % DEPTHS), to[n]);
      if (GPU_CDNA || c % 2) gpu::sched_fence();
    }
  }
  GPU_FN void transpose(V& v, u32 at, int part = 0) const {
    v.load(lds, optimization_barrier(lanes.across) + at, part);
  }
  // `v`: part 0 of y, transposed.
  GPU_FN void accumulate(Acc (&to)[PIECES][TILES], V& v, u32 at, const Piece (&b)[TILES]) const {
#pragma unroll
    for (int part = 0; part < V::PARTS; part++) {
      if (part > 0) transpose(v, at, part);
#pragma unroll
      for (int j = 0; j < V::WIDE; j++) {
        const Piece a = v.piece(j);
#pragma unroll
        for (int n = 0; n < TILES; n++) to[part * V::WIDE + j][n] = mma(T{}, a, b[n], to[part * V::WIDE + j][n]);
      }
      if (!GPU_CDNA) gpu::sched_fence();
    }
  }
  GPU_FN void hide(Acc (&s)[TILES], int row0) const {
    const int lane = int(fresh_lane()), mine = int(u32(lane) / 16);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      // A key is first seen by the query that stands at it.
      const int first_row = KEYS ? wave_column + 16 * n + (lane & 15) : first[n];
      const int from = row0 + (GPU_RDNA3 ? mine : ELEMENTS * mine) - first_row;
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++)
        s[n][e] = u32(from + (GPU_RDNA3 ? 2 * e : e)) < u32(count[n]) ? s[n][e] : HIDDEN;
    }
  }
  // Scores -> probabilities. `of_row`: dk, dv: lse of the 16 rows.
  GPU_FN void probabilities(Acc (&s)[TILES], const Acc& of_row) const {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const Acc power = __builtin_elementwise_fma(s[n], Acc(scale), KEYS ? of_row : Acc(-lse[n]));
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) s[n][e] = exp2_fast(power[e]);
    }
  }
  // g - delta -> ds.
  GPU_FN void score_gradients(Acc (&g)[TILES], const Acc (&p)[TILES]) const {
#pragma unroll
    for (int n = 0; n < TILES; n++) g[n] *= NARROW && KEYS ? p[n] * factor : p[n];
  }
  GPU_FN static void round(Piece (&to)[TILES], const Acc (&x)[TILES]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) to[n] = piece_of<T>(x[n]);
  }
  // RDNA: each matrix is read when it is used.
  GPU_FN void step(int buffer, int row0, bool partly) {
    const u32 at1 = u32(buffer) * (BUFFER * 16), at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer);
    Acc s[1][TILES], g[1][TILES];
    Piece rounded[TILES];
    V v;
    Acc of_row = Acc(0.f);
#pragma unroll
    for (int n = 0; n < TILES; n++) s[0][n] = Acc(0.f);
    product<false>(s, at1, x1, 0);
    if constexpr (KEYS) {
      gpu::sched_fence();
      if (partly) hide(s[0], row0);
      of_row = stats_of(rows);
      probabilities(s[0], of_row);
      round(rounded, s[0]);
      gpu::sched_fence();
      transpose(v, at2);
      accumulate(result2, v, at2, rounded);
      gpu::sched_fence();
      of_row = stats_of(rows + ROWS);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) g[0][n] = KEYS ? of_row : Acc(optimization_barrier(less_delta[n]));
    product<false>(g, at2, x2, 0);
    gpu::sched_fence();
    if (!KEYS && partly) hide(s[0], row0);
    if (!KEYS) probabilities(s[0], of_row);
    score_gradients(g[0], s[0]);
    round(rounded, g[0]);
    gpu::sched_fence();
    transpose(v, at1);
    accumulate(result1, v, at1, rounded);
    gpu::sched_fence();
  }
  // CDNA: waves w and w + 4 share a SIMD, and one of them is a phase behind the other, so that one is at products while
  // the other is at exponentials and reads what its next products need. A phase ends where they meet.
  GPU_FN static void meet() {
    gpu::sched_fence();
    gpu::lds_barrier();
    gpu::sched_fence();
  }
  template <class F>
  GPU_FN static void each(F what) {
#pragma unroll
    for (int y = 0; y < PARTS_Y; y++) what(y);
  }
  // `then`: where the step after this one has its rows of y1. between(): done before the last products.
  template <class F>
  GPU_FN void phases(int buffer, int i, int row0, bool partly, u32 then, F between) {
    const u32 at1 = u32(buffer) * (BUFFER * 16) + u32(i) * STEP_BYTES, at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer) + i * (16 * PARTS_Y);
    const int first_row = row0 + i * (16 * PARTS_Y);
    Acc s[PARTS_Y][TILES], g[PARTS_Y][TILES], of_row[PARTS_Y];
    Piece rounded[PARTS_Y][TILES];
    V v[PARTS_Y];
    const auto read = [&](u32 at, u32 next) {
      each([&](int y) { transpose(v[y], at + u32(y) * PART_BYTES); });
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
      each([&](int y) { accumulate(result2, v[y], at2, rounded[y]); });
      gpu::sched_fence();
    }
    each([&](int y) {
#pragma unroll
      for (int n = 0; n < TILES; n++) g[y][n] = KEYS ? of_row[y] : Acc(less_delta[n]);
    });
    product<false>(g, at2, x2, 0);
    meet();
    read(at1, then);
    each([&](int y) {
      if (!KEYS && partly) hide(s[y], first_row + 16 * y);
      if (!KEYS) probabilities(s[y], Acc(0.f));
      score_gradients(g[y], s[y]);
      round(rounded[y], g[y]);
    });
    if (!ROOM) read_ahead(then);
    between();
    meet();
    each([&](int y) { accumulate(result1, v[y], at1, rounded[y]); });
    gpu::sched_fence();
  }
  // The same of rows that no column of the wave sees.
  template <class F>
  GPU_FN void idle(u32 then, F between) {
    if (KEYS) meet(), meet();
    meet();
    read_ahead(then);
    between();
    meet();
  }

  // ---- all of them --------------------------------------------------------------------------------------------------
  GPU_FN void tile(const Source& from, Walk& w, const Span& mine) {
    Walk next = w;
    next.template step<ROWS>();
    const bool touched = mine.touches(w.row, ROWS), partly = !mine.whole(w.row, ROWS);
    if constexpr (GPU_CDNA) {
      // Tile t + 1 goes into its buffer when the late waves have read tile t - 1 for the last time: a phase later than
      // the early ones. It is there a phase before the early waves read it first, its y1 in the last phase of tile t.
#pragma unroll
      for (int i = 0; i < STEPS_Y; i++) {
        const bool last = i == STEPS_Y - 1;
        const u32 then = u32(last ? next.now : w.now) * (BUFFER * 16) + (last ? 0 : u32(i + 1) * STEP_BYTES);
        const auto between = [&] {
          if (i == STEPS_Y / 2 - 1) {
            put1(next.now);
            if (ROOM) put2(from, next);
            else fetch2(from, next);  // registers for one matrix on its way at a time
          }
          if (last) {
            Walk after = next;
            after.template step<ROWS>();
            if (!ROOM) put2(from, next);
            fetch1(from, after);
            if (ROOM) fetch2(from, after);
          }
        };
        if (touched) phases(w.now, i, w.row, partly, then, between);
        else idle(then, between);
      }
    } else {
      fetch1(from, next);
      fetch2(from, next);
      gpu::sched_fence();
      if (touched) step(w.now, w.row, partly);
      gpu::sched_fence();
      put1(next.now);
      put2(from, next);
      gpu::lds_barrier();
    }
    w = next;
  }
  // From rows `all` of heads [head, last_head].
  GPU_FN void run(const Source& from, const Span& all, const Span& mine, int head, int last_head) {
    const int begin = all.begin / ROWS * ROWS;
    const bool late = GPU_CDNA && wave >= WAVES / 2;
    Walk w{begin, head, begin, all.end, last_head, 0};
    fetch1(from, w);
    fetch2(from, w);
    put1(0);
    put2(from, w);
    if (GPU_CDNA) {
      Walk next = w;
      next.template step<ROWS>();
      fetch1(from, next);
      if (ROOM) fetch2(from, next);
    }
    gpu::lds_barrier();
    if (late) gpu::lds_barrier();
    if (GPU_CDNA) read_ahead(0);
#pragma unroll 1
    while (!w.over()) tile(from, w, mine);
    if (GPU_CDNA && !late) gpu::lds_barrier();
  }

  // Columns of a result, times `factor` of each, to rows of [columns, heads, D] from `to` on.
  template <class Out>
  GPU_FN static void store(const Acc (&x)[PIECES][TILES], const float (&factor)[TILES], Out* to, int column0,
                           int columns, long stride) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int c = column0 + WAVE_COLUMNS * int(gpu::wave()) + 16 * n + column();
      if (c >= columns) continue;
#pragma unroll
      for (int part = 0; part < V::PARTS; part++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          float out[V::WIDE];
#pragma unroll
          for (int j = 0; j < V::WIDE; j++) out[j] = x[part * V::WIDE + j][n][e] * factor[n];
          Out* place = to + c * stride + V::WIDE * (16 * part + row(e));
          if constexpr (sizeof(Out) == 4) Pairs<T>::store_floats(place, out);
          else Pairs<T>::store(place, out);
        }
    }
  }
};

}  // namespace attention
