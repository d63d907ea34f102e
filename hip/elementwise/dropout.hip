// y = x / (1 - p) where element i is kept, else 0. Kept: word i % 4 of Philox-4x32-10 with counter (i / 4, stream, 0,
// 0) and key seed[0..1] is at least `threshold` = floor(p 2^32). The same on every device.
//   x, y [n] f32, f16 or bf16 (types: x, y); seed [2] u32. keep = 1 - p.
// Launch: ceil(n / 2048) work-groups of 256, 8 elements per work-item.
// Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
#include "elements.hpp"

using namespace gpu;

struct Words {
  u32 at[4];
};
GPU_FN Words philox(u32 c0, u32 c1, u32 k0, u32 k1) {
  u32 x0 = c0, x1 = c1, x2 = 0, x3 = 0;
#pragma unroll
  for (u32 round = 0; round < 10; round++) {
    u32 h0 = mul_high(0xD2511F53u, x0), l0 = 0xD2511F53u * x0, h1 = mul_high(0xCD9E8D57u, x2), l1 = 0xCD9E8D57u * x2;
    x0 = h1 ^ x1 ^ k0;
    x1 = l1;
    x2 = h0 ^ x3 ^ k1;
    x3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}

extern "C" GPU_KERNEL(256) void dropout(const void* x, const u32* seed, void* y, u64 n, u32 stream, u32 threshold,
                                        float keep, u32 types) {
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  Eight v = load8(x, type_of(types, 0), i, n);
#pragma unroll
  for (u32 part = 0; part < 2; part++) {
    Words words = philox(u32(i / 4) + part, stream, seed[0], seed[1]);
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
      float& value = v.at[4 * part + e];
      value = words.at[e] >= threshold ? value / keep : 0.f;
    }
  }
  store8(y, type_of(types, 1), i, n, v);
}
