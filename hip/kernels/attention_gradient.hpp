// The gradient of attention, block by block: what attention_backward_dq.hip and attention_backward_dkv.hip share.
//
// A work-group owns COLUMNS rows of one side (dq: queries; dk and dv: keys) and walks over the other side's rows, ROWS
// at a time. With x the owned rows and y the walked ones (operands of the scores: x1, y1 = q and k; of their
// gradients: x2, y2 = do and v), a wave has 16 TILES owned rows as columns of every product:
//
//     s = y1 x1^T        p = exp(scale s - lse)       result1^T += y1^T ds    (dq^T = k^T ds, or dk^T = q^T ds)
//     g = y2 x2^T        ds = p (g - delta)           result2^T += y2^T p     (dv^T = do^T p; not for dq)
//
//     y1, y2 tile t + 1: memory -> registers -> LDS buffer (t + 1) % 2 (attention_walked_rows.hpp)
//     y1, y2 tile t:     LDS buffer t % 2 -> operand A twice: along the head width, and transposed in registers
//     x1, x2:            operand B, from start to end: in registers (CDNA), in LDS (RDNA)
//     p, ds:             leave the matrix unit as operand B of the next product (attention_matrix.hpp)
//
// CDNA goes through a step in phases, half of the waves one phase behind the other half (phases()). attention.md draws
// it; attention_walk.hpp has the mask, attention_range.hpp float16's range.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#pragma once
#include "attention_operands.hpp"
#include "attention_pairs.hpp"
#include "attention_walked_rows.hpp"

namespace attention {

// x is the same in all lanes: into a scalar register.
GPU_FN float uniform(float x) { return gpu::bits_to_float(gpu::uniform(gpu::float_to_bits(x))); }
GPU_FN int uniform(int x) { return int(gpu::uniform(u32(x))); }

template <class T, int D, bool KEYS>
struct Gradient : WalkedRows<T, D, KEYS> {
  using Base = WalkedRows<T, D, KEYS>;
  using S = Share<D>;
  using V = TransposedTile<D>;
  using typename Base::Source, typename Base::Y;
  using Base::ROWS, Base::BUFFER, Base::NARROW, Base::LIFTS, Base::lds, Base::wave;
  using Base::lift_y2, Base::lift_delta, Base::rows_at, Base::stats, Base::stats_of;
  using Base::fetch1, Base::fetch2, Base::put1, Base::put2;
  static constexpr int TILES = S::TILES, WAVE_COLUMNS = S::WAVE_COLUMNS, COLUMNS = S::COLUMNS;
  // A tile of ROWS is walked in STEPS_Y steps of PARTS_Y times 16 rows.
  static constexpr int PARTS_Y = GPU_CDNA && D == 64 ? 2 : 1, STEPS_Y = ROWS / (16 * PARTS_Y);
  static constexpr int DEPTHS = S::WIDTH / DEPTH, CHUNKS = PARTS_Y * DEPTHS, PIECES = S::WIDTH / 16;
  static constexpr u32 PART_BYTES = 32 * D, STEP_BYTES = PARTS_Y * PART_BYTES;
  static constexpr bool ROOM = GPU_CDNA && (!KEYS || D == 64);  // registers for more that is under way
  // Of y, transposed, how many parts are read a phase before they are used. Dk and dv of 256 have registers for one.
  static constexpr bool TIGHT = GPU_CDNA && KEYS && V::PARTS > 1;
  static constexpr int EARLY_PARTS = TIGHT ? 1 : V::PARTS;
  static constexpr int LAST_PHASE = KEYS ? 3 : 1, PUT1_PHASE = TIGHT ? 2 : LAST_PHASE;
  static constexpr int READS = GPU_CDNA ? (ROOM ? 3 : 2) : 0;   // chunks of y that are on their way from LDS
  // LDS behind the walked rows: what waves in pairs hand over, a tile of scores and one of their gradients; x1 and x2
  // where they are held there.
  static constexpr int HANDED = Base::ALL_SLOTS, HELD = HANDED + (S::PAIRED ? 2 * WAVES * HANDED_TILE : 0);
  static constexpr int SLOTS = HELD + 2 * Held<D>::SLOTS;

  Held<D> x1, x2;
  Lanes<D> lanes;
  Chunk ahead[CHUNKS];             // of y: CDNA reads the first READS of a product in the phase before it
  Acc result1[PIECES][TILES], result2[KEYS ? PIECES : 1][TILES];
  int first[TILES], count[TILES];  // rows that a column sees
  float lse[TILES];                // dq: of the columns
  Splat less_delta[TILES];         // dq: what g starts from, -delta of the columns
  float factor;                    // dk, dv of float16: of ds
  float scale;                     // of the scores, times log2 e
  int wave_column;                 // the wave's first

  GPU_FN void start(int column0) {
    lanes.start();
    wave = int(gpu::wave()), wave_column = column0 + WAVE_COLUMNS * S::place();
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        result1[i][n] = Acc(0.f);
        if (KEYS) result2[i][n] = Acc(0.f);
      }
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
  // Of waves in pairs. `which`: of two places in LDS.
  GPU_FN void exchange(Acc& tile, int which) const {
    if (!S::PAIRED) return;
    u32x4* handed = lds + HANDED + which * WAVES * HANDED_TILE;
    hand_over(handed + wave * HANDED_TILE, tile);
    meet();
    add_handed(tile, handed + (wave ^ 1) * HANDED_TILE);
  }
  // RDNA: each matrix is read when it is used.
  GPU_FN void step(int buffer, int row0, bool partly) {
    const u32 at1 = u32(rows_at(buffer)) * 16, at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer);
    Acc s[1][TILES], g[1][TILES];
    Piece rounded[TILES];
    V v;
    Acc of_row = Acc(0.f);
#pragma unroll
    for (int n = 0; n < TILES; n++) s[0][n] = Acc(0.f);
    product<false>(s, at1, x1, 0);
    exchange(s[0][0], 0);
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
    for (int n = 0; n < TILES; n++) {
      g[0][n] = KEYS ? of_row : Acc(optimization_barrier(less_delta[n]));
      if (S::PAIRED && S::first_element() > 0) g[0][n] = Acc(0.f);  // -delta counts once
    }
    product<false>(g, at2, x2, 0);
    exchange(g[0][0], 1);
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
  // the other is at exponentials and reads what its next products need. A phase ends where they meet().
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
  // The same of rows that no column of the wave sees.
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
    if constexpr (GPU_CDNA) {
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
            else fetch2(from, next);  // registers for one matrix on its way at a time
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
      if (TIGHT) {  // on its way from one tile to the next, in registers that both branches above would have to copy
        Walk after = next;
        after.template step<ROWS>();
        fetch1(from, after);
      }
    } else {
      fetch1(from, next);
      fetch2(from, next);
      gpu::sched_fence();
      if (touched) step(w.now, w.row, partly);
      else if (S::PAIRED) meet(), meet();
      gpu::sched_fence();
      if (S::PAIRED) meet();  // all have read what is overwritten
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
      const int c = column0 + WAVE_COLUMNS * S::place() + 16 * n + column();
      if (c >= columns) continue;
#pragma unroll
      for (int part = 0; part < V::PARTS; part++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          float out[V::WIDE];
#pragma unroll
          for (int j = 0; j < V::WIDE; j++) out[j] = x[part * V::WIDE + j][n][e] * factor[n];
          Out* place = to + c * stride + S::first_element() + V::WIDE * (16 * part + row(e));
          if constexpr (sizeof(Out) == 4) Pairs<T>::store_floats(place, out);
          else Pairs<T>::store(place, out);
        }
    }
  }
};

}  // namespace attention
