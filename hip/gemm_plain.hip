// The plain product: y = alpha op(a) op(b) + u op(v) + bias + residual (+ y where accumulated), any types, any sizes. What
// the matrix-unit kernels are checked against, and used where they do not serve.
//   a [M, K] (or [K, M]), b [K, N] (or [N, K]), batches one after another; u [M, r], v [r, N] (or [N, r]), bias [N] f32,
//   residual, y [M, N]. flags: 1 a transposed, 2 b (and v) transposed, 4 accumulate. types: a, b, residual, y, u, v.
// Launch: (ceil(N / 16), ceil(M / 16), batch) work-groups of 256, an element of y a work-item; 16 x 16 tiles in LDS.
#include "elements.hpp"

using namespace gpu;

constexpr u32 SIDE = 16;

struct Matrix {
  const void* data;
  u32 type;
  u64 offset, row_step, column_step;
  u32 rows, columns;

  GPU_FN float at(u32 r, u32 c) const {
    return r < rows && c < columns ? load(data, type, offset + r * row_step + c * column_step) : 0.f;
  }
};
GPU_FN Matrix matrix(const void* data, u32 type, u64 batch, u32 rows, u32 columns, bool transposed) {
  u64 offset = batch * rows * columns;
  return {data, type, offset, transposed ? 1 : u64(columns), transposed ? u64(rows) : 1, rows, columns};
}

// Row `row`, column `column` of x y; each tile is summed by itself first, which keeps the rounding of long sums small.
GPU_FN float product(const Matrix& x, const Matrix& y, u32 row, u32 column, float* left, float* right) {
  u32 i = thread() / SIDE, j = thread() % SIDE;
  float sum = 0.f;
  for (u32 k = 0; k < x.columns; k += SIDE) {
    barrier();
    left[i * (SIDE + 1) + j] = x.at(row, k + j);
    right[i * (SIDE + 1) + j] = y.at(k + i, column);
    barrier();
    float part = 0.f;
#pragma unroll
    for (u32 e = 0; e < SIDE; e++) part += left[i * (SIDE + 1) + e] * right[e * (SIDE + 1) + j];
    sum += part;
  }
  return sum;
}

extern "C" GPU_KERNEL(256) void gemm_plain(const void* a, const void* b, const float* bias, const void* residual,
                                           const void* u, const void* v, void* y, u32 m, u32 n, u32 k, u32 r, u32 flags,
                                           u32 types, float alpha) {
  GPU_SHARED(float, left, SIDE * (SIDE + 1));
  GPU_SHARED(float, right, SIDE * (SIDE + 1));
  u32 row = block_y() * SIDE + thread() / SIDE, column = block_x() * SIDE + thread() % SIDE;
  u64 batch = block_z();
  Matrix x = matrix(a, type_of(types, 0), batch, m, k, flags & 1), w = matrix(b, type_of(types, 1), batch, k, n, flags & 2);
  float sum = alpha * product(x, w, row, column, left, right);
  if (u) {
    Matrix low = matrix(u, type_of(types, 4), 0, m, r, false), high = matrix(v, type_of(types, 5), 0, r, n, flags & 2);
    sum += product(low, high, row, column, left, right);
  }
  if (row >= m || column >= n) return;
  u64 at = (batch * m + row) * n + column;
  if (bias) sum += bias[column];
  if (residual) sum += load(residual, type_of(types, 2), at);
  if (flags & 4) sum += load(y, type_of(types, 3), at);
  store(y, type_of(types, 3), at, sum);
}
