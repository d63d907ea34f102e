// The online softmax of a wave of the forward; the loops over keys are in attention_loop_cdna.hpp,
// attention_loop_rdna.hpp and, for heads of 256, attention_loop_pairs.hpp.
//
// The running maximum is raised only when a score exceeds it by 8 powers of two (Range), so o and the sum are rarely
// rescaled.
// Rounding of P, of kernels for bfloat16: RTNE, RTNA or RTZ (the result is always RTNE).
#pragma once
#include "attention_mask.hpp"
#include "attention_matrix.hpp"
#include "attention_order.hpp"

namespace attention {

constexpr int WAVES = 8, KEYS = 64, STEP = 32;  // KEYS: of a tile of K; STEP: that go through the softmax together
constexpr int THREADS = WAVES * GPU_WAVE, PARTS_K = STEP / 16;

// How waves share queries. Heads of 256: two have the same ones, and half of the width each.
template <int D>
struct Shape {
  static constexpr int HALVES = D > 128 ? 2 : 1, WIDTH = D / HALVES;
  static constexpr int TILES = GPU_CDNA ? HALVES > 1 ? 2 : 3 : 1;  // of 16 queries, of a wave
  static constexpr int WAVE_QUERIES = 16 * TILES, QUERIES = WAVES / HALVES * WAVE_QUERIES;
  static constexpr int TILE_KEYS = HALVES > 1 ? STEP : KEYS;
  // The first element of the width that is the wave's.
  GPU_FN static int first_element() { return HALVES > 1 ? int(gpu::wave() % HALVES) * WIDTH : 0; }
};
// The power of two of the largest probability when the maximum is raised, and the one at which it is raised again.
// Where the tensor cores flush float16 subnormals, they would drop probabilities below 2^-14 of the maximum, which the
// sum still counts. So everything is moved up by 2^13: what is dropped then is below 2^-27, which float16 cannot hold
// anyway.
template <class T>
struct Range {
  static constexpr float START = 0.f, END = 8.f;
};
template <>
struct Range<F16> {
  static constexpr float START = FLUSHES_HALVES ? 13.f : 0.f, END = FLUSHES_HALVES ? 15.f : 8.f;
};
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Problem {
  const void *q, *k, *v;
  const int *doc_start, *cache_len;
  void* o;
  float* lse;
  int batch, queries, keys, heads, kv_heads, splits, dies, window;
  float scale;
};

// A wave's position in its keys: LDS buffer `now` holds the tile at key0.
struct Walk {
  const Rows &k_rows, &v_rows;
  const Mask& mask;
  const Seen& mine;
  const u32 stride;
  const float scale;
  const int query0;
  const bool late;  // of CDNA's two groups
  u32x4* lds;
  int now, key0;
};

template <class T, int D>
struct Softmax {
  using S = Shape<D>;
  static constexpr int TILES = S::TILES, DEPTHS = S::WIDTH / DEPTH, PIECES = S::WIDTH / 16;
  // Neighbors of the head width that a lane's results of one row are.
  static constexpr int WIDE = S::HALVES > 1 ? Transposed<S::WIDTH>::WIDE : PIECES;

  Chunk q[TILES][DEPTHS];
  Acc o[PIECES][TILES];
  float top[TILES];       // the maximum in use less Range::START, as a power of two
  gpu::f32x2 sum[TILES];  // of even and of odd elements

  GPU_FN void start(const Problem& p, const Mask& mask, int query0, const Place& at) {
    const u32 stride = u32(p.heads) * D * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int query = mask.clamp(query0 + 16 * n + column());
      const char* mine = (const char*)p.q + ((long)at.batch * p.queries + query) * stride + at.head * D * 2 +
                         S::first_element() * 2;
#pragma unroll
      for (int d = 0; d < DEPTHS; d++) q[n][d] = chunk(d, [&](int c) { return gpu::load16(mine + 16 * c); });
      top[n] = HIDDEN, sum[n] = gpu::f32x2(0.f);
#pragma unroll
      for (int i = 0; i < PIECES; i++) o[i][n] = Acc(0.f);
    }
  }

  // s += K Q^T of 16 keys, by chunk d of the width; the first begins at `zero`.
  // CDNA4's instruction for both parts is no faster here in the model: it takes registers that reading ahead would use.
  GPU_FN void score(Acc (&s)[TILES], const Chunk& k, int d, const Acc& zero) const {
#pragma unroll
    for (int part = 0; part < STEPS; part++)
#pragma unroll
      for (int n = 0; n < TILES; n++)
        s[n] = mma(T{}, k.at[part], q[n][d].at[part], d + part == 0 ? zero : s[n]);
  }
  // Rare: what a query sees is recomputed here rather than kept in registers.
  GPU_FN static void hide(Acc (&s)[PARTS_K][TILES], const Walk& w, int key0) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int query = w.mask.clamp(w.query0 + 16 * n + optimization_barrier(column()));
      const int first = w.mask.first(query), last = w.mask.last(query);
#pragma unroll
      for (int i = 0; i < PARTS_K; i++) {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          const int j = key0 + 16 * i + row(e);
          s[i][n][e] = j >= first && j <= last ? s[i][n][e] : -__builtin_inff();
        }
        s[i][n] = optimization_barrier(s[i][n]);
      }
    }
  }
  // Scores -> probabilities as operands; raises the maximum where a lane's own scores outgrow it.
  GPU_FN void softmax(Acc (&s)[PARTS_K][TILES], Piece (&p)[PARTS_K][TILES], float scale) {
    float most[TILES], above = HIDDEN;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      most[n] = s[0][n][0];
#pragma unroll
      for (int i = 0; i < PARTS_K; i++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) most[n] = __builtin_fmaxf(most[n], s[i][n][e]);
      above = __builtin_fmaxf(above, __builtin_fmaf(most[n], scale, -top[n]));
    }
    if (__builtin_expect(any(above > Range<T>::END), 0)) rescale(most, scale);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
      for (int i = 0; i < PARTS_K; i++) {
        Acc x = fused(s[i][n], scale, -top[n]);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) x[e] = exp2_fast(x[e]);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e += 2) sum[n] += gpu::f32x2{x[e], x[e + 1]};
        p[i][n] = piece_of<T>(x);
      }
    }
    gpu::sched_fence();
  }
  GPU_FN void rescale(const float (&most)[TILES], float scale) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      float highest = column_max(most[n]) * scale;
      if (Range<T>::START > 0.f) highest -= Range<T>::START;
      const float raised = __builtin_fmaxf(top[n], highest), factor = exp2_fast(top[n] - raised);
      top[n] = raised;
      sum[n] *= factor;
#pragma unroll
      for (int i = 0; i < PIECES; i++) o[i][n] *= factor;
    }
  }
  GPU_FN void finish(const Problem& p, int query0, const Place& at) {
    using Out = Pairs<T>;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int query = query0 + 16 * n + column();
      const float total = column_sum(sum[n][0] + sum[n][1]);
      const float inverse = total > 0.f ? 1.f / total : 0.f;  // 0: no key in this split
      if (query >= p.queries) continue;
      const long place = ((long)at.batch * p.queries + query) * p.heads + at.head;
      const long part = (long)at.split * p.batch * p.queries * p.heads;
      if (group() == 0 && S::first_element() == 0)
        p.lse[part + ((long)at.batch * p.heads + at.head) * p.queries + query] =
            total > 0.f ? top[n] * LN2 + gpu::log(total) : HIDDEN;
#pragma unroll
      for (int first = 0; first < PIECES; first += WIDE)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          const int d = S::first_element() + first * 16 + WIDE * row(e);
          float x[WIDE];
#pragma unroll
          for (int j = 0; j < WIDE; j++) x[j] = o[first + j][n][e] * inverse;
          if (p.splits > 1) Out::store_floats((float*)p.o + (part + place) * D + d, x);
          else Out::store((char*)p.o + (place * D + d) * 2, x);
        }
    }
  }
};

}  // namespace attention
