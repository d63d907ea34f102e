// A soft-cap: y = cap tanh(x / cap), and its derivative from y.
#pragma once
#include "gpu.hpp"

namespace gpu {

// Cephes, tanhf (Moshier): a polynomial near 0, where 1 - exp(-2 |x|) has lost digits.
GPU_FN float tanh_near(float x) {
  float z = x * x;
  float poly = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z;
  return x + x * z * (poly - 3.33332819422e-1f);
}
GPU_FN float capped(float x, float cap) {
  float z = x / cap, size = z < 0.f ? -z : z;
  float e = gpu::exp(-2.f * size), far = (1.f - e) / (1.f + e);
  return cap * (size < 0.625f ? tanh_near(z) : z < 0.f ? -far : far);
}
GPU_FN float cap_slope(float y, float cap) { return 1.f - (y / cap) * (y / cap); }

}  // namespace gpu
