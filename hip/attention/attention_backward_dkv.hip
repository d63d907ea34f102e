// Flash attention backward on the tensor cores, second half: the gradients of keys and values.
//
//     p[t, j] = exp(scale q[t] k[j] - lse[t])      ds[t, j] = p[t, j] (do[t] v[j] - delta[t])
//     dk[j] = scale sum_t ds[t, j] q[t]            dv[j] = sum_t p[t, j] do[t]
//
// over the queries t, of all query heads of the key's head, that see key j (attention_mask.hpp, cache_len 0).
// do, q: [B, T, H, D]; k, v, dk, dv: [B, T, G, D], float16 or bfloat16, D 64, 128 or 256; lse, delta float32 [B, H, T];
// doc_start int32 [B, T]. For float16 also the lengths of the rows of do, float32 [B, H, T], and of v, [B, G, T]
// (attention_row_dots).
// Launch: (G splits, B, ceil(T / COLUMNS)) groups of THREADS; the pipeline is in attention_gradient.hpp, float16's
// range in attention_range.hpp. With splits > 1 each takes a share of the query heads and writes float32 dk and dv
// [splits, B, T, G, D], for attention_sum_parts.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2; sums in a fixed order, no atomics.
#include "attention_gradient.hpp"

namespace attention {

// Powers of two by which float16's ds, do and v are scaled for matmuls, from the longest do and v and the largest delta
// of this block.
struct Shifts {
  int ds, grad, v;
};
template <class F>
GPU_FN Shifts choose_shifts(const Source& from, const float* grad_lengths, const float* v_lengths,
                        const Span& all, int column0, int head, int last_head, float* memory) {
  float longest = 0.f, largest = 0.f, longest_v = 0.f;
  for (int h = head; h <= last_head; h++)
    for (int t = all.begin + int(gpu::thread()); t < all.end; t += THREADS) {
      longest = gpu::max(longest, grad_lengths[(long)h * from.length + t]);
      largest = gpu::max(largest, gpu::abs(from.delta[(long)h * from.length + t]));
    }
  for (int j = column0 + int(gpu::thread()); j < gpu::min(column0 + F::COLUMNS, from.length); j += THREADS)
    longest_v = gpu::max(longest_v, v_lengths[j]);
  longest = gpu::block_max<THREADS>(longest, memory);
  largest = gpu::block_max<THREADS>(largest, memory);
  longest_v = gpu::block_max<THREADS>(longest_v, memory);
  gpu::barrier();
  return {uniform(shift_for(longest * longest_v + largest)), F::LIFTS ? uniform(lift_for(longest)) : 0,
          F::LIFTS ? uniform(lift_for(longest_v)) : 0};
}

template <class T, int D>
GPU_FN void backward_dkv(const void* grad, const void* q, const void* k, const void* v, const float* lse,
                         const float* delta, const float* grad_lengths, const float* v_lengths, const int* doc_start,
                         void* dk, void* dv, const Sizes& p, int splits, float scale, u32x4* lds) {
  using F = Gradient<T, D, true>;
  const int kv_head = gpu::block_x() / splits, split = gpu::block_x() % splits, batch = gpu::block_y();
  const int column0 = gpu::block_z() * F::COLUMNS, wave0 = column0 + F::WAVE_COLUMNS * Share<D>::place();
  const int per = p.heads / p.kv_heads, share = (per + splits - 1) / splits;
  const int head = kv_head * per + split * share, last_head = gpu::min(head + share, (kv_head + 1) * per) - 1;
  const Sight<true> sight{Mask{doc_start + (long)batch * p.length, p.length, p.length, 0, p.window}};
  const Span all(sight, column0, F::COLUMNS), mine(sight, wave0, F::WAVE_COLUMNS);
  const u32 stride = u32(p.heads) * D * 2, kv_stride = u32(p.kv_heads) * D * 2, bytes = u32(p.length) * stride;
  const long slice = (long)batch * p.length * stride, row = (long)batch * p.heads * p.length;
  const long kv_slice = (long)batch * p.length * kv_stride + kv_head * D * 2;
  const Source from{
      {(const char*)q + slice, stride, bytes}, {(const char*)grad + slice, stride, bytes}, lse + row, delta + row,
      p.length};

  F f;
  f.lds = lds, f.scale = uniform(scale * LOG2E);
#pragma unroll
  for (int n = 0; n < F::TILES; n++) {
    const int key = sight.mask.clamp(wave0 + 16 * n + column());
    f.first[n] = sight.begin(key), f.count[n] = sight.end(key) - f.first[n];
  }
  Shifts shifts{0, 0, 0};
  if (F::NARROW)
    shifts = choose_shifts<F>(from, grad_lengths + row, v_lengths + ((long)batch * p.kv_heads + kv_head) * p.length,
                              all, column0, head, last_head, (float*)lds);
  f.factor = power_of_two(shifts.ds - P_SHIFT - shifts.grad - shifts.v);
  f.load_columns((const char*)k + kv_slice, (const char*)v + kv_slice, sight.mask, column0, kv_stride);
  if constexpr (F::LIFTS) {
    f.lift_y2 = halves_of_two(shifts.grad), f.lift_delta = power_of_two(shifts.grad + shifts.v);
    u32 lift_x2[F::TILES];
#pragma unroll
    for (int n = 0; n < F::TILES; n++) lift_x2[n] = halves_of_two(shifts.v);
    f.x2.lift(lift_x2);
  }
  f.start(column0, stride);
  f.run(from, all, mine, head, last_head);
  float of_k[F::TILES], of_v[F::TILES];
#pragma unroll
  for (int n = 0; n < F::TILES; n++)
    of_k[n] = power_of_two(-shifts.ds), of_v[n] = power_of_two(F::NARROW ? -P_SHIFT - shifts.grad : 0);
#pragma unroll
  for (int n = 0; n < F::TILES; n++)
#pragma unroll
    for (int i = 0; i < F::PIECES; i++) f.result1[i][n] *= scale;
  const long width = (long)p.kv_heads * D;
  if (splits > 1) {
    const long part = (long)split * gpu::grid_y() * p.length * width + kv_slice / 2;
    f.store(f.result1, of_k, (float*)dk + part, column0, p.length, width);
    f.store(f.result2, of_v, (float*)dv + part, column0, p.length, width);
  } else {
    f.store(f.result1, of_k, (gpu::u16*)((char*)dk + kv_slice), column0, p.length, width);
    f.store(f.result2, of_v, (gpu::u16*)((char*)dv + kv_slice), column0, p.length, width);
  }
}

}  // namespace attention

#define BACKWARD_DKV(suffix, T, D)                                                                                     \
  extern "C" GPU_KERNEL(attention::THREADS) GPU_WAVES_PER_SIMD(2) void attention_backward_dkv_##suffix##_##D(             \
      const void* grad, const void* q, const void* k, const void* v, const float* lse, const float* delta,             \
      const float* grad_lengths, const float* v_lengths, const int* doc_start, void* dk, void* dv, int length, int heads, \
      int kv_heads, int splits, int window, float scale) {                                                             \
    using F = attention::Gradient<attention::T, D, true>;                                                              \
    GPU_SHARED(gpu::u32x4, lds, F::SLOTS);                                                                             \
    attention::backward_dkv<attention::T, D>(grad, q, k, v, lse, delta, grad_lengths, v_lengths, doc_start, dk, dv,       \
                                             {length, heads, kv_heads, window}, splits, scale, lds);                   \
  }
BACKWARD_DKV(f16, F16, 64)
BACKWARD_DKV(f16, F16, 128)
BACKWARD_DKV(f16, F16, 256)
BACKWARD_DKV(bf16, BF16<gpu::Round::RTNE>, 64)
BACKWARD_DKV(bf16, BF16<gpu::Round::RTNE>, 128)
BACKWARD_DKV(bf16, BF16<gpu::Round::RTNE>, 256)
