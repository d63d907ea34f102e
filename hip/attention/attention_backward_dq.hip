// Flash attention backward on the tensor cores, first half: the gradient of the queries.
//
//     p[t, j] = exp(scale q[t] k[j] - lse[t])      ds[t, j] = p[t, j] (do[t] v[j] - delta[t])
//     dq[t] = scale sum_j ds[t, j] k[j]            over the keys j that query t sees (attention_mask.hpp, cache_len 0)
//
// do, q, dq: [B, T, H, D]; k, v: [B, T, G, D], float16 or bfloat16, D 64, 128 or 256; lse, delta float32 [B, H, T];
// doc_start int32 [B, T]. For float16 also the lengths of the rows of do, float32 [B, H, T], and of v, [B, G, T]
// (attention_row_dots).
// Launch: (H B, ceil(T / COLUMNS)) groups of THREADS, placed by attention_order.hpp; `dies` of the GPU take them in
// turn. The pipeline is in attention_gradient.hpp, float16's range in attention_range.hpp.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2; the split into two passes makes it deterministic.
#include "attention_gradient.hpp"
#include "attention_order.hpp"

namespace attention {

template <class T, int D>
GPU_FN void backward_dq(const void* grad, const void* q, const void* k, const void* v, const float* lse,
                        const float* delta, const float* grad_lengths, const float* v_lengths, const int* doc_start,
                        void* dq, const Sizes& p, int dies, float scale, u32x4* lds) {
  using F = Gradient<T, D, false>;
  const Place at = place(p.heads, 1, dies);
  const int head = at.head, batch = at.batch, column0 = at.block * F::COLUMNS, kv_head = head / (p.heads / p.kv_heads);
  const Sight<false> sight{Mask{doc_start + (long)batch * p.length, p.length, p.length, 0, p.window}};
  const int wave0 = column0 + F::WAVE_COLUMNS * Share<D>::place();
  const Span all(sight, column0, F::COLUMNS), mine(sight, wave0, F::WAVE_COLUMNS);
  const u32 stride = u32(p.heads) * D * 2, kv_stride = u32(p.kv_heads) * D * 2;
  const long slice = (long)batch * p.length * stride + head * D * 2, kv_slice = (long)batch * p.length * kv_stride;

  F f;
  f.lds = lds, f.scale = uniform(scale * LOG2E);
  float longest = 0.f, back[F::TILES];
  u32 lift_x2[F::TILES];
  if (F::NARROW) {
    const float* lengths = v_lengths + ((long)batch * p.kv_heads + kv_head) * p.length;
    for (int i = all.begin + int(gpu::thread()); i < all.end; i += THREADS) longest = gpu::max(longest, lengths[i]);
    longest = gpu::block_max<THREADS>(longest, (float*)lds);
    gpu::barrier();
  }
  const int lift_v = F::LIFTS ? lift_for(uniform(longest)) : 0;
  if constexpr (F::LIFTS) f.lift_y2 = halves_of_two(lift_v);
#pragma unroll
  for (int n = 0; n < F::TILES; n++) {
    const int query = sight.mask.clamp(wave0 + 16 * n + column());
    const long row = ((long)batch * p.heads + head) * p.length + query;
    f.first[n] = sight.begin(query), f.count[n] = sight.end(query) - f.first[n];
    float own_delta = delta[row];
    f.lse[n] = lse[row] * LOG2E, back[n] = scale;
    if (F::NARROW) {
      const int shift = shift_for(grad_lengths[row] * longest + gpu::abs(own_delta));
      const int lift = F::LIFTS ? lift_for(grad_lengths[row]) : 0;
      lift_x2[n] = halves_of_two(lift), own_delta *= power_of_two(lift + lift_v);
      f.lse[n] -= float(shift - lift - lift_v), back[n] = power_of_two(-shift);
    }
    f.less_delta[n] = optimization_barrier(Splat(-own_delta));
  }
  f.load_columns((const char*)q + slice, (const char*)grad + slice, sight.mask, column0, stride);
  if constexpr (F::LIFTS) f.x2.lift(lift_x2);
  f.start(column0, kv_stride);
  const u32 bytes = u32(p.length) * kv_stride;
  const Source from{{(const char*)k + kv_slice, kv_stride, bytes},
                                {(const char*)v + kv_slice, kv_stride, bytes},
                                nullptr, nullptr, p.length};
  f.run(from, all, mine, kv_head, kv_head);
  if (F::NARROW) {
#pragma unroll
    for (int n = 0; n < F::TILES; n++)
#pragma unroll
      for (int i = 0; i < F::PIECES; i++) f.result1[i][n] *= scale;
  }
  f.store(f.result1, back, (gpu::u16*)((char*)dq + slice), column0, p.length, (long)p.heads * D);
}

}  // namespace attention

#define BACKWARD_DQ(suffix, T, D)                                                                                      \
  extern "C" GPU_KERNEL(attention::THREADS) GPU_WAVES_PER_SIMD(2) void attention_backward_dq_##suffix##_##D(              \
      const void* grad, const void* q, const void* k, const void* v, const float* lse, const float* delta,             \
      const float* grad_lengths, const float* v_lengths, const int* doc_start, void* dq, int length, int heads,           \
      int kv_heads, int dies, int window, float scale) {                                                               \
    using F = attention::Gradient<attention::T, D, false>;                                                             \
    GPU_SHARED(gpu::u32x4, lds, F::SLOTS);                                                                             \
    attention::backward_dq<attention::T, D>(grad, q, k, v, lse, delta, grad_lengths, v_lengths, doc_start, dq,            \
                                            {length, heads, kv_heads, window}, dies, scale, lds);                      \
  }
BACKWARD_DQ(f16, F16, 64)
BACKWARD_DQ(f16, F16, 128)
BACKWARD_DQ(f16, F16, 256)
BACKWARD_DQ(bf16, BF16<gpu::Round::RTNE>, 64)
BACKWARD_DQ(bf16, BF16<gpu::Round::RTNE>, 128)
BACKWARD_DQ(bf16, BF16<gpu::Round::RTNE>, 256)
