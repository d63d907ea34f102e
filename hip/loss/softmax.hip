// Softmax of rows: y = exp(x - max) / sum; backward: dx = y (dy - sum(dy y)). And the cross-entropy of rows of logits:
// loss = log(sum exp(x - max)) - (x[target] - max), the logits replaced by their gradient softmax(x) - onehot(target);
// target -100: loss 0, gradient 0. With cap > 0 of the logits cap tanh(x / cap).
//   x, y, dy, dx [R, C] f32, f16 or bf16; logits [R, C] f32; targets [all rows] i32, losses [all rows] f32, from
//   `first`.
// Launch: one work-group of 256 per row.
#include "elements.hpp"
#include "softcap.hpp"

using namespace gpu;

struct Row {
  u64 begin, end;
  bool aligned;
};
GPU_FN Row row_of(u32 columns) {
  u64 begin = u64(block_x()) * columns;
  return {begin, begin + columns, columns % 8 == 0};
}
constexpr float LOWEST = -3.0e38f;

// Largest element, and the sum of exp(x - largest), in one pass (online softmax): a work-item's sum is relative to the
// largest element that it has seen, and is rescaled when that rises.
GPU_FN void statistics(const void* x, u32 type, Row row, u32 columns, float* memory, float* top, float* total) {
  float best = LOWEST, sum = 0.f;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(x, type, row.begin + c, row.end, row.aligned);
    float higher = best;
#pragma unroll
    for (u32 e = 0; e < 8; e++) higher = max(higher, c + e < columns ? v.at[e] : LOWEST);
    sum *= gpu::exp(best - higher);
    best = higher;
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += c + e < columns ? gpu::exp(v.at[e] - best) : 0.f;
  }
  *top = block_max<256>(best, memory);
  *total = block_sum<256>(sum * gpu::exp(best - *top), memory);
}

// types: x, y
extern "C" GPU_KERNEL(256) void softmax(const void* x, void* y, u32 columns, u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  Row row = row_of(columns);
  float top, total;
  statistics(x, type_of(types, 0), row, columns, memory, &top, &total);
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(x, type_of(types, 0), row.begin + c, row.end, row.aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) v.at[e] = gpu::exp(v.at[e] - top) / total;
    store8(y, type_of(types, 1), row.begin + c, row.end, v, row.aligned);
  }
}

// types: dy, y, dx
extern "C" GPU_KERNEL(256) void softmax_backward(const void* dy, const void* y, void* dx, u32 columns, u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  Row row = row_of(columns);
  float sum = 0.f;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight g = load8(dy, type_of(types, 0), row.begin + c, row.end, row.aligned);
    Eight p = load8(y, type_of(types, 1), row.begin + c, row.end, row.aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += g.at[e] * p.at[e];
  }
  sum = block_sum<256>(sum, memory);
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight g = load8(dy, type_of(types, 0), row.begin + c, row.end, row.aligned);
    Eight p = load8(y, type_of(types, 1), row.begin + c, row.end, row.aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) p.at[e] *= g.at[e] - sum;
    store8(dx, type_of(types, 2), row.begin + c, row.end, p, row.aligned);
  }
}

extern "C" GPU_KERNEL(256) void cross_entropy(float* logits, const int* targets, float* losses, u32 columns, u32 first,
                                              u32 gradient, float cap) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  Row row = row_of(columns);
  int target = targets[first + block_x()];
  float top = 0.f, total = 1.f;
  if (cap > 0.f && target >= 0) {
    for (u32 c = thread() * 8; c < columns; c += 2048) {  // the same eight that this work-item reads below
      Eight v = load8(logits, F32, row.begin + c, row.end, row.aligned);
#pragma unroll
      for (u32 e = 0; e < 8; e++) v.at[e] = capped(v.at[e], cap);
      store8(logits, F32, row.begin + c, row.end, v, row.aligned);
    }
    barrier();  // any work-item may read the target's logit
  }
  if (target >= 0) {
    statistics(logits, F32, row, columns, memory, &top, &total);
    float at_target = logits[row.begin + u32(target)] - top;
    if (thread() == 0) losses[first + block_x()] = gpu::log(total) - at_target;
    barrier();  // the target's logit is read before it is replaced
  } else if (thread() == 0) {
    losses[first + block_x()] = 0.f;
  }
  if (!gradient) return;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(logits, F32, row.begin + c, row.end, row.aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      float slope = cap > 0.f ? cap_slope(v.at[e], cap) : 1.f;
      v.at[e] = target < 0 ? 0.f : gpu::exp(v.at[e] - top) / total - (c + e == u32(target) ? 1.f : 0.f);
      v.at[e] *= slope;
    }
    store8(logits, F32, row.begin + c, row.end, v, row.aligned);
  }
}
