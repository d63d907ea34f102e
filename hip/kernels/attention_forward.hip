// Flash attention forward on the matrix units: o = softmax(scale q k^T, masked) v and the log-sum-exp of every row.
//
//     s[t, j] = scale sum_d q[t, h, d] k[j, g, d],   h = query head, g = h / (H / G)
//     o[t] = sum_j exp(s[t, j] - lse[t]) v[j],       lse[t] = log sum_j exp(s[t, j])
//
// q, o: [B, T, H, D]; k, v: [B, S, G, D], float16 or bfloat16, D 64 or 128; doc_start int32 [B, T]; cache_len int32 [1];
// lse float32 [B, H, T]. The mask is in attention_mask.hpp. Launch: (H B, splits ceil(T / QUERIES)) groups of THREADS,
// placed by attention_order.hpp; `dies` of the card take them in turn.
// With splits > 1 each takes a share of the keys and writes float32 o [splits, B, T, H, D] and lse [splits, B, H, T]
// for attention_combine.
//
// Pipeline of a work-group of eight waves in two groups; wave w and w + 4 share a SIMD and are of different groups. A
// step is 32 keys, a tile of K two steps. Between two barriers one group is at products and the other at its softmax:
//
//     early group | V P (i - 1), K Q^T i | softmax i            | V P i, K Q^T (i + 1)  | softmax (i + 1) ...
//     late group  | softmax (i - 1)      | V P (i - 1), K Q^T i | softmax i             | V P i, K Q^T (i + 1) ...
//
//     K tile t + 1: memory -> registers beside the first K Q^T of tile t -> LDS buffer (t + 1) % 2 beside the V P after
//                   it, by all waves together, 128 bits at a time; two barriers later the first wave reads it
//     K tile t:     LDS buffer t % 2 -> operand A of S^T = K Q^T; Q is operand B, in registers from start to end
//     V:            memory (L1: all waves read the same) -> registers beside K Q^T, transposed there: operand A of
//                   O^T = V^T P^T. On CDNA all of a step before its softmax; on RDNA, with fewer registers, as it goes
//     P:            S^T leaves the matrix unit as operand B of the second product: registers only
//     (attention_matrix.hpp)
//
// The running maximum is only raised when a score outgrows it by 2^8 (Range): o and the sum are rescaled rarely.
// Rounding of P, of kernels for bfloat16: RTNE, RTNA or RTZ (the result is always RTNE).
// Sources: Dao, FlashAttention-2 (arXiv:2307.08691); Shah et al., FlashAttention-3 (arXiv:2407.08608, two groups).
#include "attention_mask.hpp"
#include "attention_matrix.hpp"
#include "attention_order.hpp"

namespace attention {

constexpr int TILES = GPU_CDNA ? 3 : 1;          // of 16 queries, of a wave
constexpr int WAVES = 8, KEYS = 64, STEP = 32;  // KEYS: of a tile of K; STEP: that go through the softmax together
constexpr int THREADS = WAVES * GPU_WAVE, PARTS_K = STEP / 16;
constexpr int WAVE_QUERIES = 16 * TILES, QUERIES = WAVES * WAVE_QUERIES;
// Where the maximum stands when it is raised, and how far a score may come before it is raised again, as powers of two
// of the probability. Where float16 subnormals are flushed, the product would lose what is below 2^-14 of the maximum,
// while the sum keeps its share. So all of it moves up by 2^13; of what is lost, below 2^-27, float16 itself keeps
// nothing.
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

template <class T, int D>
struct Forward {
  using V = Transposed<D>;
  using K = Staged<KEYS, D, THREADS>;
  static constexpr int DEPTHS = D / DEPTH, PIECES = D / 16, CHUNKS = PARTS_K * DEPTHS;
  static constexpr int READS = GPU_CDNA ? 2 : 1;  // chunks of K that are on their way from LDS
  // Loads of V in a step, and how many of them are in registers at once, fetched beside the scores.
  static constexpr int STEPS_V = PARTS_K * V::PARTS, AHEAD = GPU_CDNA ? STEPS_V : 1;
  static constexpr int STRETCHES = STEPS_V * V::WIDE;  // of products with one operand of V

  K k;  // the next tile of K on its way to LDS
  int own = optimization_barrier(K::own_slot());
  Chunk q[TILES][DEPTHS];
  Chunk a[READS + 1];  // of K: the first READS were read in the step before
  Acc o[PIECES][TILES];
  float top[TILES];       // the maximum in use less Range::START, as a power of two
  gpu::f32x2 sum[TILES];  // of even and of odd elements

  GPU_FN void start(const Problem& p, const Mask& mask, int query0, const Place& at) {
    const u32 stride = u32(p.heads) * D * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int query = mask.clamp(query0 + 16 * n + column());
      const char* mine = (const char*)p.q + ((long)at.batch * p.queries + query) * stride + at.head * D * 2;
#pragma unroll
      for (int d = 0; d < DEPTHS; d++) q[n][d] = chunk(d, [&](int c) { return gpu::load16(mine + 16 * c); });
      top[n] = HIDDEN, sum[n] = gpu::f32x2(0.f);
#pragma unroll
      for (int i = 0; i < PIECES; i++) o[i][n] = Acc(0.f);
    }
  }

  // Where a wave stands in its keys: LDS buffer `now` (in slots) holds K of the tile at key0.
  struct Walk {
    const Rows &k_rows, &v_rows;
    const Mask& mask;
    const Seen& mine;
    const u32 stride;
    const float scale;
    const int query0;
    const bool late;
    u32x4* lds;
    int now, key0;
    GPU_FN int next() const { return K::SLOTS - now; }
  };

  GPU_FN void read_first(const Walk& w, int buffer, int step) {
#pragma unroll
    for (int c = 0; c < READS; c++) a[c] = K::read(w.lds + buffer, own, PARTS_K * step + c / DEPTHS, c % DEPTHS);
  }
  // S^T = K Q^T of a step, without the scale; `beside(c)` is done beside the c-th of CHUNKS stretches of products.
  template <class F>
  GPU_FN void scores(Acc (&s)[PARTS_K][TILES], const Walk& w, int step, F beside) {
    const Acc zero = optimization_barrier(Acc(0.f));  // one for all: the compiler would make each its own
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int i = c / DEPTHS, d = c % DEPTHS, next = c + READS;
      if (next < CHUNKS)
        a[next % (READS + 1)] = K::read(w.lds + w.now, own, PARTS_K * step + next / DEPTHS, next % DEPTHS);
      beside(c);
#pragma unroll
      for (int part = 0; part < STEPS; part++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
          s[i][n] = mma(T{}, a[c % (READS + 1)].at[part], q[n][d].at[part], d + part == 0 ? zero : s[i][n]);
      gpu::sched_fence();
    }
  }
  // Rare: what a query sees is worked out again here rather than kept in registers.
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
  // O^T += V^T P^T of a step; `beside(j)` as in scores, of STEPS_V * V::WIDE stretches.
  template <class F>
  GPU_FN void values(const Piece (&p)[PARTS_K][TILES], V (&v)[AHEAD], const Walk& w, int key0, u32 stride, F beside) {
    Piece piece = v[0].piece(0);
    gpu::sched_fence();
#pragma unroll
    for (int j = 0; j < STRETCHES; j++) {
      const int load = j / V::WIDE;
      const Piece now = piece;
      if (AHEAD > 1 && j + 1 < STRETCHES) piece = v[(j + 1) / V::WIDE % AHEAD].piece((j + 1) % V::WIDE);
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        Acc& to = o[load % V::PARTS * V::WIDE + j % V::WIDE][n];
        to = mma(T{}, now, p[load / V::PARTS][n], to);
      }
      beside(j);
      gpu::sched_fence();
      const bool used_up = j % V::WIDE == V::WIDE - 1;
      if (used_up && load + AHEAD < STEPS_V) load_values(v[load % AHEAD], w, key0, stride, load + AHEAD);
      if (AHEAD == 1 && j + 1 < STRETCHES) piece = v[0].piece((j + 1) % V::WIDE);
    }
  }
  GPU_FN static void load_values(V& v, const Walk& w, int key0, u32 stride, int step) {
    v.load(w.v_rows, u32(key0 + 16 * (step / V::PARTS)) * stride, stride, step % V::PARTS);
  }

  GPU_FN static void meet() {
    gpu::sched_fence();
    gpu::lds_barrier();
    gpu::sched_fence();
  }
  template <int AT>  // 0 or 1: which step of the tile
  GPU_FN void step(const Walk& w) {
    const int key0 = w.key0 + STEP * AT, after = AT == 0 ? w.now : w.next();
    const u32 stride = uniform_barrier(w.stride);
    if (w.mine.touches(key0, STEP)) {
      V v[AHEAD];
      Acc s[PARTS_K][TILES];
      Piece p[PARTS_K][TILES];
      scores(s, w, AT, [&](int c) {
        if (AT == 0 && c == 0) k.load(w.k_rows, w.key0 + KEYS, stride);
        if (c % (CHUNKS / AHEAD) == 0) load_values(v[c / (CHUNKS / AHEAD)], w, key0, stride, c / (CHUNKS / AHEAD));
      });
      if (!w.mine.whole(key0, STEP)) hide(s, w, key0);
      meet();
      softmax(s, p, w.scale);
      meet();
      values(p, v, w, key0, stride, [&](int j) {
        if (AT == 0 && j == 1) k.store(w.lds + w.next());
        if (j == STRETCHES - 2) read_first(w, after, 1 - AT);
      });
    } else {
      if (AT == 0) {
        k.load(w.k_rows, w.key0 + KEYS, stride);
        k.store(w.lds + w.next());
      }
      meet();
      meet();
      read_first(w, after, 1 - AT);
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
      if (group() == 0)
        p.lse[part + ((long)at.batch * p.heads + at.head) * p.queries + query] =
            total > 0.f ? top[n] * LN2 + gpu::log(total) : HIDDEN;
#pragma unroll
      for (int part_d = 0; part_d < V::PARTS; part_d++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
          const int d = V::WIDE * (16 * part_d + row(e));
          float x[V::WIDE];
#pragma unroll
          for (int j = 0; j < V::WIDE; j++) x[j] = o[part_d * V::WIDE + j][n][e] * inverse;
          if (p.splits > 1) Out::store_floats((float*)p.o + (part + place) * D + d, x);
          else Out::store((char*)p.o + (place * D + d) * 2, x);
        }
    }
  }
};

template <class T, int D>
GPU_FN void forward(const Problem& p, u32x4* lds) {
  using F = Forward<T, D>;
  const Place at = place(p.heads, p.splits, p.dies);
  const Mask mask{p.doc_start + (long)at.batch * p.queries, p.queries, p.keys, *p.cache_len, p.window};
  const int wave = gpu::wave(), query0 = at.block * QUERIES + wave * WAVE_QUERIES;
  const Seen all(mask, at.block * QUERIES, QUERIES), mine(mask, query0, WAVE_QUERIES);
  const int tiles = (all.end + KEYS - 1) / KEYS - all.begin / KEYS, share = (tiles + p.splits - 1) / p.splits;
  const int tile0 = all.begin / KEYS + at.split * share;
  const int begin = tile0 * KEYS, end = gpu::min(begin + share * KEYS, all.end);

  const u32 stride = u32(p.kv_heads) * D * 2;
  const long slice = (long)at.batch * p.keys * stride + at.head / (p.heads / p.kv_heads) * D * 2;
  const Rows k_rows((const char*)p.k + slice, u32(all.end - 1) * stride + D * 2);
  const Rows v_rows((const char*)p.v + slice, u32(all.end - 1) * stride + D * 2);
  const bool late = wave >= WAVES / 2;

  F f;
  f.start(p, mask, query0, at);
  f.k.load(k_rows, begin, stride);
  f.k.store(lds);
  gpu::lds_barrier();
  typename F::Walk walk{k_rows, v_rows, mask, mine, stride, p.scale * LOG2E, query0, late, lds, 0, begin};
  if (late) gpu::lds_barrier();  // a phase behind the early ones
  f.read_first(walk, 0, 0);
#pragma unroll 1
  for (; walk.key0 < end; walk.now = walk.next(), walk.key0 += KEYS) {
    f.template step<0>(walk);
    f.template step<1>(walk);
  }
  if (!late) gpu::lds_barrier();
  f.finish(p, query0, at);
}

}  // namespace attention

#define FORWARD(name, T, D)                                                                                            \
  extern "C" GPU_KERNEL(attention::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                              \
      const void* q, const void* k, const void* v, const int* doc_start, const int* cache_len, void* o, float* lse,         \
      int batch, int queries, int keys, int heads, int kv_heads, int splits, int dies, int window, float scale) {      \
    GPU_SHARED(gpu::u32x4, lds, (2 * attention::KEYS * (D) / 8));                                                      \
    const attention::Problem p{q,     k,       v,    doc_start, cache_len,  o,      lse,    batch,                          \
                               queries, keys, heads, kv_heads, splits, dies, window, scale};                           \
    attention::forward<attention::T, D>(p, lds);                                                                       \
  }
#define FORWARD_WIDTHS(suffix, T)                 \
  FORWARD(attention_forward_##suffix##_64, T, 64) \
  FORWARD(attention_forward_##suffix##_128, T, 128)
FORWARD_WIDTHS(f16, F16)
FORWARD_WIDTHS(bf16_rtne, BF16<gpu::Round::RTNE>)
FORWARD_WIDTHS(bf16_rtna, BF16<gpu::Round::RTNA>)
FORWARD_WIDTHS(bf16_rtz, BF16<gpu::Round::RTZ>)
