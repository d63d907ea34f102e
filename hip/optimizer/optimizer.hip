// The optimizer step over one flat float32 buffer; scalars stay on the device (layouts of hyper [4] and state [8] are
// in autograd/ops/optimizer.py).
//   grad_norm: g [n] -> part [work-groups, 2]: sum of squares of the finite elements, number of the others; then
//   grad_norm_total: part -> out [2]. clip: one work-item. adamw: in place on p, m, v [n].
// Launch: grad_norm any number of work-groups of 256; grad_norm_total one of 256; clip one of 64; adamw ceil(n / 1024)
// of 256.
// Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Micikevicius et al., Mixed Precision
// Training (2018).
#include "elements.hpp"

using namespace gpu;

constexpr u32 LR = 0, MAX_NORM = 1, GROWTH_INTERVAL = 2;
constexpr u32 APPLIED = 0, GOOD = 1, APPLY = 2, FACTOR = 3, GRAD_NORM = 4, BIAS1 = 5, BIAS2 = 6, SKIPPED = 7;

extern "C" GPU_KERNEL(256) void grad_norm(const float* g, float* part, u64 n) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  float sum = 0.f, bad = 0.f;
  for (u64 i = (u64(block_x()) * 256 + thread()) * 8; i < n; i += u64(grid_x()) * 2048) {
    Eight v = load8(g, F32, i, n);
    float s = 0.f;
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      bool finite = is_finite(v.at[e]);
      s += finite ? v.at[e] * v.at[e] : 0.f;
      bad += finite ? 0.f : 1.f;
    }
    sum += s;
  }
  sum = block_sum<256>(sum, memory);
  bad = block_sum<256>(bad, memory);
  if (thread() == 0) part[block_x() * 2] = sum, part[block_x() * 2 + 1] = bad;
}

extern "C" GPU_KERNEL(256) void grad_norm_total(const float* part, float* out, u32 parts) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  float sum = 0.f, bad = 0.f;
  for (u32 i = thread(); i < parts; i += 256) sum += part[2 * i], bad += part[2 * i + 1];
  sum = block_sum<256>(sum, memory);
  bad = block_sum<256>(bad, memory);
  if (thread() == 0) out[0] = sum, out[1] = bad;
}

extern "C" GPU_KERNEL(64) void clip(const float* norm, const float* hyper, float* state, float* loss_scale, float beta1,
                                    float beta2, float rest1, float rest2) {
  if (thread() != 0) return;
  float scale = loss_scale[0], interval = hyper[GROWTH_INTERVAL];
  if (norm[1] > 0.f || !is_finite(norm[0])) {
    state[APPLY] = 0.f, state[FACTOR] = 0.f, state[GRAD_NORM] = -1.f, state[GOOD] = 0.f;
    state[SKIPPED] += 1.f;
    if (interval > 0.f) loss_scale[0] = max(1.f, scale / 2.f);
    return;
  }
  float total = gpu::sqrt(norm[0]) / scale, factor = 1.f / scale;
  if (hyper[MAX_NORM] > 0.f) factor *= min(1.f, hyper[MAX_NORM] / (total + 1e-6f));
  state[APPLY] = 1.f, state[FACTOR] = factor, state[GRAD_NORM] = total;
  state[APPLIED] += 1.f;
  state[BIAS1] = state[BIAS1] * beta1 + rest1;  // 1 - beta^applied, without the cancellation
  state[BIAS2] = state[BIAS2] * beta2 + rest2;
  float good = state[GOOD] + 1.f;
  if (interval > 0.f && good >= interval) {
    loss_scale[0] = min(65536.f, scale * 2.f);
    good = 0.f;
  }
  state[GOOD] = good;
}

extern "C" GPU_KERNEL(256) void adamw(float* p, const float* g, float* m, float* v, const float* hyper,
                                      const float* state, u64 n, u64 decayed, float beta1, float beta2, float rest1,
                                      float rest2, float eps, float weight_decay) {
  if (state[APPLY] == 0.f) return;
  float lr = hyper[LR], factor = state[FACTOR], bias1 = state[BIAS1], bias2 = state[BIAS2];
  u64 first = (u64(block_x()) * 256 + thread()) * 4;
  u64 end = min(first + 4, n);
  bool whole = first + 4 <= n;
  auto step = [&](u64 i, float& param, float grad, float& mean, float& square) {
    grad *= factor;
    mean = mean * beta1 + rest1 * grad;
    square = square * beta2 + rest2 * grad * grad;
    if (i < decayed) param -= lr * weight_decay * param;
    param -= lr * (mean / bias1) / (gpu::sqrt(square / bias2) + eps);
  };
  if (whole) {
    f32x4 param = load16<f32x4>(p + first), grad = load16<f32x4>(g + first), mean = load16<f32x4>(m + first);
    f32x4 square = load16<f32x4>(v + first);
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
      float a = param[e], b = mean[e], c = square[e];
      step(first + e, a, grad[e], b, c);
      param[e] = a, mean[e] = b, square[e] = c;
    }
    store16(p + first, param), store16(m + first, mean), store16(v + first, square);
  } else {
    for (u64 i = first; i < end; i++) step(i, p[i], g[i], m[i], v[i]);
  }
}
