// Flash attention forward on the tensor cores: o = softmax(scale q k^T, masked) v and the log-sum-exp of every row.
//
//     s[t, j] = scale sum_d q[t, h, d] k[j, g, d],   h = query head, g = h / (H / G)
//     o[t] = sum_j exp(s[t, j] - lse[t]) v[j],       lse[t] = log sum_j exp(s[t, j])
//
// q, o: [B, T, H, D]; k, v: [B, S, G, D], float16 or bfloat16, D 64, 128 or 256; doc_start int32 [B, T];
// cache_len int32 [1]; lse float32 [B, H, T]. The mask is in attention_mask.hpp.
// Launch: (H B, splits ceil(T / QUERIES)) groups of THREADS, placed by attention_order.hpp; `dies` of the GPU take
// them in turn.
// With splits > 1 each takes a share of the keys and writes float32 o [splits, B, T, H, D] and lse [splits, B, H, T]
// for attention_combine.
//
// A work-group of eight waves owns QUERIES queries of a head and walks over the keys that they see, a tile of KEYS at a
// time; STEP of them go through a wave's softmax together (attention_softmax.hpp).
// Source: Dao, FlashAttention-2 (arXiv:2307.08691).
#include "attention_softmax.hpp"
#if GPU_CDNA
#include "attention_loop_cdna.hpp"
#else
#include "attention_loop_rdna.hpp"
#endif
#include "attention_loop_pairs.hpp"

namespace attention {

template <class T, int D>
GPU_FN void forward(const Problem& p, u32x4* lds) {
  using S = Shape<D>;
  constexpr int KEYS = S::TILE_KEYS;
  const Place at = place(p.heads, p.splits, p.dies);
  const Mask mask{p.doc_start + (long)at.batch * p.queries, p.queries, p.keys, *p.cache_len, p.window};
  const int wave = gpu::wave(), query0 = at.block * S::QUERIES + wave / S::HALVES * S::WAVE_QUERIES;
  const Seen all(mask, at.block * S::QUERIES, S::QUERIES), mine(mask, query0, S::WAVE_QUERIES);
  const int tiles = (all.end + KEYS - 1) / KEYS - all.begin / KEYS, share = (tiles + p.splits - 1) / p.splits;
  const int tile0 = all.begin / KEYS + at.split * share;
  const int begin = tile0 * KEYS, end = gpu::min(begin + share * KEYS, all.end);

  const u32 stride = u32(p.kv_heads) * D * 2;
  const long slice = (long)at.batch * p.keys * stride + at.head / (p.heads / p.kv_heads) * D * 2;
  const Rows k_rows((const char*)p.k + slice, u32(all.end - 1) * stride + D * 2);
  const Rows v_rows((const char*)p.v + slice + S::first_element() * 2, u32(all.end - 1) * stride + S::WIDTH * 2);
  const bool late = wave >= WAVES / 2;

  Forward<T, D> f;
  f.start(p, mask, query0, at);
  f.first_tile(k_rows, v_rows, lds, begin, stride);
  Walk walk{k_rows, v_rows, mask, mine, stride, p.scale * LOG2E, query0, late, lds, 0, begin};
  f.walk(walk, end);
  f.finish(p, query0, at);
}

}  // namespace attention

#define FORWARD(name, T, D)                                                                                            \
  extern "C" GPU_KERNEL(attention::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                              \
      const void* q, const void* k, const void* v, const int* doc_start, const int* cache_len, void* o, float* lse,         \
      int batch, int queries, int keys, int heads, int kv_heads, int splits, int dies, int window, float scale) {      \
    GPU_SHARED(gpu::u32x4, lds, (attention::Forward<attention::T, D>::SLOTS));                                         \
    const attention::Problem p{q,     k,       v,    doc_start, cache_len,  o,      lse,    batch,                          \
                               queries, keys, heads, kv_heads, splits, dies, window, scale};                           \
    attention::forward<attention::T, D>(p, lds);                                                                       \
  }
#define FORWARD_WIDTHS(suffix, T)                   \
  FORWARD(attention_forward_##suffix##_64, T, 64)   \
  FORWARD(attention_forward_##suffix##_128, T, 128) \
  FORWARD(attention_forward_##suffix##_256, T, 256)
FORWARD_WIDTHS(f16, F16)
FORWARD_WIDTHS(bf16_rtne, BF16<gpu::Round::RTNE>)
FORWARD_WIDTHS(bf16_rtna, BF16<gpu::Round::RTNA>)
FORWARD_WIDTHS(bf16_rtz, BF16<gpu::Round::RTZ>)
