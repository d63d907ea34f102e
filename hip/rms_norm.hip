// RMSNorm. Forward: rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd w. Backward, with g = dy w and n = x rstd:
// dx = rstd (g - n mean(g n)) + residual; dweight = sum over rows of dy n, in parts of `rows_per` rows (a fixed order;
// reduce.hip adds the parts).
//   x, dy, y, dx, residual [R, C]; w [C] f32; rstd [R] f32; part [parts, C] f32. types: see each kernel.
// Launch: one work-group of 256 a row; dweight: (ceil(C / 256), parts) work-groups of 256, a column a work-item.
// Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
#include "elements.hpp"

using namespace gpu;

// types: x, y
extern "C" GPU_KERNEL(256) void rms_norm(const void* x, const float* w, void* y, float* rstd, u32 columns, float eps,
                                         u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  u64 row = u64(block_x()) * columns, end = row + columns;
  bool aligned = columns % 8 == 0;
  float sum = 0.f;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(x, type_of(types, 0), row + c, end, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += v.at[e] * v.at[e];
  }
  float r = 1.f / gpu::sqrt(block_sum<256>(sum, memory) / float(columns) + eps);
  if (thread() == 0) rstd[block_x()] = r;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight v = load8(x, type_of(types, 0), row + c, end, aligned), weight = load8(w, F32, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) v.at[e] = v.at[e] * r * weight.at[e];
    store8(y, type_of(types, 1), row + c, end, v, aligned);
  }
}

// types: dy, x, residual, dx
extern "C" GPU_KERNEL(256) void rms_norm_backward(const void* dy, const void* x, const float* w, const float* rstd,
                                                  const void* residual, void* dx, u32 columns, u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  u64 row = u64(block_x()) * columns, end = row + columns;
  bool aligned = columns % 8 == 0;
  float r = rstd[block_x()], sum = 0.f;
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight g = load8(dy, type_of(types, 0), row + c, end, aligned), v = load8(x, type_of(types, 1), row + c, end, aligned);
    Eight weight = load8(w, F32, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += g.at[e] * weight.at[e] * (v.at[e] * r);
  }
  float mean = block_sum<256>(sum, memory) / float(columns);
  for (u32 c = thread() * 8; c < columns; c += 2048) {
    Eight g = load8(dy, type_of(types, 0), row + c, end, aligned), v = load8(x, type_of(types, 1), row + c, end, aligned);
    Eight weight = load8(w, F32, c, columns, aligned), more;
    if (residual) more = load8(residual, type_of(types, 2), row + c, end, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      v.at[e] = (g.at[e] * weight.at[e] - v.at[e] * r * mean) * r;
      if (residual) v.at[e] += more.at[e];
    }
    store8(dx, type_of(types, 3), row + c, end, v, aligned);
  }
}

// types: dy, x
extern "C" GPU_KERNEL(256) void rms_norm_dweight(const void* dy, const void* x, const float* rstd, float* part,
                                                 u32 rows, u32 columns, u32 rows_per, u32 types) {
  u32 c = block_x() * 256 + thread(), first = block_y() * rows_per, last = min(first + rows_per, rows);
  if (c >= columns) return;
  float sum = 0.f;
  for (u32 r = first; r < last; r++) {
    u64 i = u64(r) * columns + c;
    sum += load(dy, type_of(types, 0), i) * (load(x, type_of(types, 1), i) * rstd[r]);
  }
  part[u64(block_y()) * columns + c] = sum;
}
