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
// The columns that see a walked row are a range, and so are the rows that a column sees: `doc_start` rises. So both
// kernels mask alike: column c sees the rows [first, first + count).
//
// Range of float16: p and ds are small where a row sees many keys or the loss is not scaled. p is at most 1 and goes
// into products times 2^15. |g - delta| <= |do| |v| + |delta| bounds ds: a power of two takes the bound to between 2^14
// and 2^15, one for each query for dq, one for each work-group's keys for dk. Both leave with the result, exactly. The
// softmax's scale is applied to float32 results only. Where the matrix unit takes float16 subnormals for 0, do and v go
// into products lifted by up to 2^10, which makes normal numbers of all of them, as far as the longest row allows (the
// scales above stay what they are). bfloat16 has float32's range and needs none of this.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#pragma once
#include "attention_operands.hpp"

namespace attention {

constexpr float LOG2E = 1.4426950408889634f, NOTHING = 1e30f;  // a lse that leaves no probability

template <class T>
struct Narrow {
  static constexpr bool YES = false;
};
template <>
struct Narrow<F16> {
  static constexpr bool YES = true;
};
constexpr int P_SHIFT = 15;  // probabilities of float16 go into products times 2^P_SHIFT

// x is the same in all lanes: into a scalar register.
GPU_FN float uniform(float x) { return gpu::bits_to_float(gpu::uniform(gpu::float_to_bits(x))); }
// The lane's number, found again wherever this stands.
GPU_FN u32 fresh_lane() { return optimization_barrier(gpu::lane()); }
// 2^n for -126 <= n <= 127.
GPU_FN float power_of_two(int n) { return gpu::bits_to_float(u32(n + 127) << 23); }
// n with bound 2^n between 2^14 and 2^15, within what float32 has room for.
GPU_FN int shift_for(float bound) {
  const int n = 14 + 127 - int(gpu::float_to_bits(bound) >> 23 & 255);
  return n < -100 ? -100 : n > 100 ? 100 : n;
}
// The power of two, 0 to 10, by which rows of at most this length are lifted; and as two halves of float16.
GPU_FN int lift_for(float length) {
  const int n = shift_for(length);
  return n < 0 ? 0 : n > 10 ? 10 : n;
}
GPU_FN u32 halves_of_two(int n) { return u32(n + 15) * 0x04000400u; }

struct Sizes {
  int length, heads, kv_heads, window;
};

// The rows that each column sees: [begin(c), end(c)), both rising with c.
template <bool KEYS>  // columns are keys, rows are queries; or the other way round
struct Sight {
  Mask mask;
  GPU_FN int begin(int c) const { return KEYS ? c : mask.first(c); }
  GPU_FN int end(int c) const {
    if (!KEYS) return c + 1;
    int low = c + 1, high = mask.queries;  // queries below `low` see key c
    while (low < high) {
      const int middle = (low + high) / 2;
      if (mask.first(middle) <= c) low = middle + 1;
      else high = middle;
    }
    return low;
  }
};
// Rows that `count` columns from `column` on see among them, and those that each of them sees.
struct Span {
  int begin, end, all_begin, all_end;
  template <bool KEYS>
  GPU_FN Span(const Sight<KEYS>& sight, int column, int count) {
    const int from = sight.mask.clamp(column), to = sight.mask.clamp(column + count - 1);
    begin = int(gpu::uniform(u32(sight.begin(from)))), end = int(gpu::uniform(u32(sight.end(to))));
    all_begin = int(gpu::uniform(u32(sight.begin(to)))), all_end = int(gpu::uniform(u32(sight.end(from))));
    if (column >= sight.mask.queries) end = begin;
  }
  GPU_FN bool touches(int row, int count) const { return row < end && row + count > begin; }
  GPU_FN bool whole(int row, int count) const { return row >= all_begin && row + count <= all_end; }
};

// One matrix that is walked: [length, heads, D] of one batch element.
struct Walked {
  const char* base;
  u32 stride, bytes;
  GPU_FN Rows of_head(int head, u32 head_bytes) const {
    return Rows(base + head * head_bytes, bytes - head * head_bytes);
  }
};

// Where a work-group stands: rows [row, row + ROWS) of `head`, in LDS buffer `now`; `next` is what comes then.
struct Walk {
  int row, head, begin, end, last_head, now;
  template <int ROWS>
  GPU_FN void step() {
    row += ROWS, now ^= 1;
    if (row >= end) row = begin, head++;
  }
  GPU_FN bool over() const { return head > last_head; }
};

template <class T, int D, bool KEYS>
struct Gradient {
  static constexpr int ROWS = GPU_CDNA ? 4096 / D : 16, STEPS_Y = ROWS / 16, DEPTHS = D / DEPTH, PIECES = D / 16;
  static constexpr bool NARROW = Narrow<T>::YES, LIFTS = NARROW && FLUSHES_HALVES;
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
  Acc result1[PIECES][TILES], result2[KEYS ? PIECES : 1][TILES];
  int first[TILES], count[TILES];  // rows that a column sees
  float lse[TILES], delta[TILES];  // dq: of the columns
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
    y1.load(from.y1.of_head(gpu::min(w.head, w.last_head), D * 2), w.row, uniform_barrier(from.y1.stride));
  }
  // The first wave brings lse and delta of y2's rows.
  GPU_FN void fetch2(const Source& from, const Walk& w) {
    const int head = gpu::min(w.head, w.last_head);
    y2.load(from.y2.of_head(head, D * 2), w.row, uniform_barrier(from.y2.stride));
    if (KEYS && wave == 0) {
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
      stats(w.now)[place + ROWS] = there ? (LIFTS ? row_delta * lift_delta : row_delta) : 0.f;
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

  // ---- 16 walked rows -----------------------------------------------------------------------------------------------
  // `at`: bytes from the start of LDS to those rows of y.
  GPU_FN void product(Acc (&s)[TILES], u32 at, const Held<D>& x) const {
#pragma unroll
    for (int n = 0; n < TILES; n++) s[n] = Acc(0.f);
    const u32 along = optimization_barrier(lanes.along);
#pragma unroll
    for (int d = 0; d < DEPTHS; d++) {
      const Chunk a = read_along(lds, along + at, d);
#pragma unroll
      for (int n = 0; n < TILES; n++) s[n] = multiply(T{}, a, x.read(lds, along, n, d), s[n]);
      if (!GPU_CDNA && d % 2) gpu::sched_fence();
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
  // g -> ds. `of_row`: dk, dv: delta of the 16 rows.
  GPU_FN void score_gradients(Acc (&g)[TILES], const Acc (&p)[TILES], const Acc& of_row) const {
#pragma unroll
    for (int n = 0; n < TILES; n++)
      g[n] = (NARROW && KEYS ? p[n] * factor : p[n]) * (g[n] - (KEYS ? of_row : Acc(delta[n])));
  }
  GPU_FN static void round(Piece (&to)[TILES], const Acc (&x)[TILES]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) to[n] = piece_of<T>(x[n]);
  }
  // CDNA has registers to read stats and what is transposed ahead of where they are used; the fences keep them there.
  GPU_FN void step(int buffer, int i, int row0, bool partly) {
    const u32 at1 = u32(buffer) * (BUFFER * 16) + u32(i) * (32 * D), at2 = at1 + Y::SLOTS * 16;
    const float* rows = stats(buffer) + i * 16;
    Acc s[TILES], g[TILES];
    Piece rounded[TILES];
    V v;
    Acc of_row = Acc(0.f);
    if (KEYS && GPU_CDNA) of_row = stats_of(rows);
    product(s, at1, x1);
    if constexpr (KEYS) {
      if (GPU_CDNA) transpose(v, at2);
      gpu::sched_fence();
      if (partly) hide(s, row0 + 16 * i);
      if (!GPU_CDNA) of_row = stats_of(rows);
      probabilities(s, of_row);
      round(rounded, s);
      gpu::sched_fence();
      if (!GPU_CDNA) transpose(v, at2);
      accumulate(result2, v, at2, rounded);
      if (!GPU_CDNA) gpu::sched_fence();
    }
    if (KEYS && GPU_CDNA) of_row = stats_of(rows + ROWS);
    product(g, at2, x2);
    gpu::sched_fence();
    if (GPU_CDNA) {
      transpose(v, at1);
      gpu::sched_fence();
    }
    if (!KEYS && partly) hide(s, row0 + 16 * i);
    if (!KEYS) probabilities(s, of_row);
    if (KEYS && !GPU_CDNA) of_row = stats_of(rows + ROWS);
    score_gradients(g, s, of_row);
    round(rounded, g);
    gpu::sched_fence();
    if (!GPU_CDNA) transpose(v, at1);
    accumulate(result1, v, at1, rounded);
    gpu::sched_fence();
  }

  // ---- all of them --------------------------------------------------------------------------------------------------
  GPU_FN void tile(const Source& from, Walk& w, const Span& mine) {
    Walk next = w;
    next.template step<ROWS>();
    const bool touched = mine.touches(w.row, ROWS), partly = !mine.whole(w.row, ROWS);
    // One matrix on its way at a time, where there are steps enough: half the registers.
    constexpr int HALF = STEPS_Y / 2;
    fetch1(from, next);
    if (HALF > 0) {
      gpu::sched_fence();
      if (touched) {
#pragma unroll
        for (int i = 0; i < HALF; i++) step(w.now, i, w.row, partly);
      }
      gpu::sched_fence();
      put1(next.now);
    }
    fetch2(from, next);
    gpu::sched_fence();
    if (touched) {
#pragma unroll
      for (int i = HALF; i < STEPS_Y; i++) step(w.now, i, w.row, partly);
    }
    gpu::sched_fence();
    if (HALF == 0) put1(next.now);
    put2(from, next);
    gpu::lds_barrier();
    w = next;
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
    while (!w.over()) tile(from, w, mine);
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
