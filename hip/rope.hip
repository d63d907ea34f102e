// y[n, h] = (a cos - b sin, b cos + a sin) with a, b the halves of x[n, h] and the row positions[n] of the tables; with
// `inverse` sin is negated.
//   x, y [N, H, 2 half] (types: x, y); cos, sin [P, half] f32; positions [N] i32.
// With q_start [1] i32, y is a cache [B, keys, H, 2 half] and row n = b tokens + t goes to y[b, q_start + t]: rotary
// embedding and the append to the cache in one.
// Launch: ceil(N H ceil(half / 8) / 256) work-groups of 256, 8 pairs a work-item; less than 2^32 work-items.
// Source: Su et al., RoFormer (2021), with the halves paired as in LLaMA's Hugging Face form.
#include "elements.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void rope(const void* x, const float* cosines, const float* sines, const int* positions,
                                     const int* q_start, void* y, u32 rows, u32 heads, u32 half_width, u32 inverse,
                                     u32 tokens, u32 keys, u32 types) {
  // 32-bit numbers: the remainder of 64-bit ones is a long loop.
  u32 chunks = (half_width + 7) / 8, item = block_x() * 256 + thread(), row = item / chunks, i = item % chunks * 8;
  if (row >= rows) return;
  bool aligned = half_width % 8 == 0;
  u32 n = row / heads;
  u64 table = u64(positions[n]) * half_width, table_end = table + half_width;
  u64 first = u64(row) * 2 * half_width, middle = first + half_width, end = middle + half_width;
  Eight c = load8(cosines, F32, table + i, table_end, aligned), s = load8(sines, F32, table + i, table_end, aligned);
  Eight a = load8(x, type_of(types, 0), first + i, middle, aligned);
  Eight b = load8(x, type_of(types, 0), middle + i, end, aligned), left, right;
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    float sine = inverse ? -s.at[e] : s.at[e];
    left.at[e] = a.at[e] * c.at[e] - b.at[e] * sine;
    right.at[e] = b.at[e] * c.at[e] + a.at[e] * sine;
  }
  if (q_start) {
    u64 to = (u64(n / tokens) * keys + u32(q_start[0]) + n % tokens) * heads + row % heads;
    first = to * 2 * half_width, middle = first + half_width, end = middle + half_width;
  }
  store8(y, type_of(types, 1), first + i, middle, left, aligned);
  store8(y, type_of(types, 1), middle + i, end, right, aligned);
}
