// Log-odds of log-probabilities: y = z - log(1 - exp(z)), z = min(x, -2^-20); with dy: y = dy / (1 - exp(z)), 0 where
// x is larger than z.
//   x, dy, y [n] f32, f16 or bf16 (types in this order); dy may be null.
// Launch: ceil(n / 2048) work-groups of 256, 8 elements per work-item.
#include "elements.hpp"

using namespace gpu;

// 1 - exp(z) of z < 0: next to 0 by its series, whose first term left out is 3e-9 of it at -0.5.
GPU_FN float one_minus_exp(float z) {
  float series = 1.f;
#pragma unroll
  for (int k = 9; k > 1; k--) series = 1.f + z / float(k) * series;
  return z > -0.5f ? -z * series : 1.f - gpu::exp(z);
}

extern "C" GPU_KERNEL(256) void log_odds(const void* x, const void* dy, void* y, u64 n, u32 types) {
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  Eight a = load8(x, type_of(types, 0), i, n), g, out;
  if (dy) g = load8(dy, type_of(types, 1), i, n);
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    bool beyond = a.at[e] > -0x1p-20f;
    float z = beyond ? -0x1p-20f : a.at[e], rest = one_minus_exp(z);
    out.at[e] = !dy ? z - gpu::log(rest) : beyond ? 0.f : g.at[e] / rest;
  }
  store8(y, type_of(types, 2), i, n, out);
}
