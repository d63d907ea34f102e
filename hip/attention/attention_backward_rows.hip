// Attention's backward, before and after its two main kernels: dot products of rows, and sums of partial results.
//
//     attention_row_dots:  dots[b, h, t] = sum_d x[b, t, h, d] y[b, t, h, d],   lengths[b, h, t] = |x[b, t, h]|
//     attention_sum_parts: out[i] = sum_s parts[s, i]
//
// x, y [B, T, H, D] float16 or bfloat16, D 64, 128 or 256; dots, lengths float32 [B, H, T], each may be missing (delta
// is the dots of do and o). parts float32 [splits, n], out [n], n a multiple of 4. Sums in float32, in a fixed order.
// Launch: groups of 256; row_dots: D / 8 work-items per row, the rows in memory's order; sum_parts: 4 results a
// work-item.
// Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2, line 4.
#include "attention_matrix.hpp"

namespace attention {

constexpr u32 GROUP = 256;

// The sum of two rows of 16 lanes, where all lanes of a row have the same value; through scalar registers.
GPU_FN float sum_of_two_rows(float x) {
  const float first = gpu::lane_value(x, 0) + gpu::lane_value(x, 16);
  if constexpr (GPU_WAVE == 32) return first;
  const float second = gpu::lane_value(x, GPU_WAVE - 32) + gpu::lane_value(x, GPU_WAVE - 16);
  return gpu::lane() < 32 ? first : second;
}

template <class T>
GPU_FN void row_dots(const void* x, const void* y, float* dots, float* lengths, u32 rows, u32 length, u32 heads,
                     u32 width) {
  const u32 lanes = width / 8, item = gpu::block_x() * GROUP + gpu::thread(), found = item / lanes;
  const u32 row = gpu::min(found, rows - 1);  // all lanes take part in the sum
  const gpu::u64 at = (gpu::u64(row) * width + item % lanes * 8) * 2;
  const u32x4 a = gpu::load16((const char*)x + at), b = gpu::load16((const char*)(dots ? y : x) + at);
  float dot = 0.f, square = 0.f;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const float low = T::number(a[w] & 0xffffu), high = T::number(a[w] >> 16);
    dot = gpu::fma(high, T::number(b[w] >> 16), gpu::fma(low, T::number(b[w] & 0xffffu), dot));
    square = gpu::fma(high, high, gpu::fma(low, low, square));
  }
  if (lanes == 8) {
    dot = gpu::row_reduce<8>(dot, gpu::Sum{}), square = gpu::row_reduce<8>(square, gpu::Sum{});
  } else {
    dot = gpu::row_reduce<16>(dot, gpu::Sum{}), square = gpu::row_reduce<16>(square, gpu::Sum{});
  }
  if (lanes == 32) dot = sum_of_two_rows(dot), square = sum_of_two_rows(square);
  if (item % lanes || found >= rows) return;
  const u32 h = row % heads, t = row / heads % length, batch = row / heads / length;
  const gpu::u64 to = (gpu::u64(batch) * heads + h) * length + t;
  if (dots) dots[to] = dot;
  if (lengths) lengths[to] = gpu::sqrt(square);
}

template <class T>
GPU_FN void sum_parts(const float* parts, void* out, gpu::u64 n, u32 splits) {
  const gpu::u64 i = (gpu::u64(gpu::block_x()) * GROUP + gpu::thread()) * 4;
  if (i >= n) return;
  gpu::f32x4 sum(0.f);
  for (u32 s = 0; s < splits; s++) sum += gpu::load16<gpu::f32x4>(parts + s * n + i);
  *(u32x2*)((char*)out + i * 2) = u32x2{T::result(sum[0], sum[1]), T::result(sum[2], sum[3])};
}

}  // namespace attention

#define ROWS(suffix, T)                                                                                                \
  extern "C" GPU_KERNEL(256) void attention_row_dots_##suffix(                                                         \
      const void* x, const void* y, float* dots, float* lengths, gpu::u32 rows, gpu::u32 length, gpu::u32 heads,       \
      gpu::u32 width) {                                                                                                \
    attention::row_dots<attention::T>(x, y, dots, lengths, rows, length, heads, width);                                \
  }                                                                                                                    \
  extern "C" GPU_KERNEL(256) void attention_sum_parts_##suffix(const float* parts, void* out, gpu::u64 n,              \
                                                               gpu::u32 splits) {                                      \
    attention::sum_parts<attention::T>(parts, out, n, splits);                                                         \
  }
ROWS(f16, F16)
ROWS(bf16, BF16<gpu::Round::RTNE>)
