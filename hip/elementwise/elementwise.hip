// y = a op b, element by element. op: 0 a + b, 1 a * b, 2 alpha a, 3 a b[0], 4 a + b[i % columns], 5 a where the u32
// b[i] is not 0, else alpha, 6 a (cast).
//   a, b, y [n] f32, f16 or bf16 (types: a, b, y); b of 3: [1], of 4: [columns]. y may be a or b.
// softcap: y = cap tanh(x / cap); types: x, y.
// Launch: ceil(n / 2048) work-groups of 256, 8 elements per work-item.
#include "elements.hpp"
#include "softcap.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void elementwise(const void* a, const void* b, void* y, u64 n, u32 op, u32 types,
                                            u32 columns, float alpha) {
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  u32 b_type = type_of(types, 1);
  Eight x = load8(a, type_of(types, 0), i, n);
  if (op <= 1) {
    Eight z = load8(b, b_type, i, n);
#pragma unroll
    for (u32 e = 0; e < 8; e++) x.at[e] = op == 0 ? x.at[e] + z.at[e] : x.at[e] * z.at[e];
  } else if (op <= 3) {
    float factor = op == 2 ? alpha : load(b, b_type, 0);
#pragma unroll
    for (u32 e = 0; e < 8; e++) x.at[e] *= factor;
  } else if (op == 4) {
    u32 column = n >> 32 ? u32(i % columns) : u32(i) % columns;  // the 64-bit remainder is a long loop
    if (columns % 8 == 0) {
      Eight z = load8(b, b_type, column, columns);
#pragma unroll
      for (u32 e = 0; e < 8; e++) x.at[e] += z.at[e];
    } else {
#pragma unroll
      for (u32 e = 0; e < 8; e++) {
        x.at[e] += load(b, b_type, column);
        column = column + 1 == columns ? 0 : column + 1;
      }
    }
  } else if (op == 5) {
    const u32* keep = as<u32>(b) + i;
    if (i + 8 <= n) {
      u32x4 low = load16(keep), high = load16(keep + 4);
#pragma unroll
      for (u32 e = 0; e < 8; e++) x.at[e] = (e < 4 ? low[e] : high[e - 4]) ? x.at[e] : alpha;
    } else {
#pragma unroll
      for (u32 e = 0; e < 8; e++) x.at[e] = keep[min(u64(e), n - i - 1)] ? x.at[e] : alpha;
    }
  }
  store8(y, type_of(types, 2), i, n, x);
}

extern "C" GPU_KERNEL(256) void softcap(const void* x, void* y, u64 n, u32 types, float cap) {
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  Eight v = load8(x, type_of(types, 0), i, n);
#pragma unroll
  for (u32 e = 0; e < 8; e++) v.at[e] = capped(v.at[e], cap);
  store8(y, type_of(types, 1), i, n, v);
}
