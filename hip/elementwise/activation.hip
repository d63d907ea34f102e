// y = act(x), or act(x) * up; backward: y = dy act'(x) (* up), dup = dy act(x). act: SiLU, x s(x), or GELU in its tanh
// form, x s(2 sqrt(2 / pi) (x + 0.044715 x^3)), with s(z) = 1 / (1 + exp(-z)).
//   x, up, dy, y, dup [n] f32, f16 or bf16 (types in this order); up, dy, dup may be null.
// Launch: ceil(n / 2048) work-groups of 256, 8 elements per work-item.
// Sources: Elfwing et al. (2017); Hendrycks and Gimpel (2016); Shazeer, GLU Variants Improve Transformer (2020).
#include "elements.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void activation(const void* x, const void* up, const void* dy, void* y, void* dup, u64 n,
                                           u32 gelu, u32 types) {
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  Eight a = load8(x, type_of(types, 0), i, n), u, g, out, out_up;
  if (up) u = load8(up, type_of(types, 1), i, n);
  if (dy) g = load8(dy, type_of(types, 2), i, n);
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    float v = a.at[e], z = v, slope = 1.f;
    if (gelu) {
      z = 2.f * 0.7978845608028654f * (v + 0.044715f * v * v * v);
      slope = 2.f * 0.7978845608028654f * (1.f + 3.f * 0.044715f * v * v);
    }
    float s = 1.f / (1.f + gpu::exp(-z)), value = v * s;
    if (dy) {
      float d = s + value * (1.f - s) * slope;
      out.at[e] = g.at[e] * d * (up ? u.at[e] : 1.f);
      out_up.at[e] = g.at[e] * value;
    } else {
      out.at[e] = up ? value * u.at[e] : value;
    }
  }
  store8(y, type_of(types, 3), i, n, out);
  if (dup) store8(dup, type_of(types, 4), i, n, out_up);
}
