// RMSNorm. Forward: rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd w. Backward, with g = dy w and n = x rstd:
// dx = rstd (g - n mean(g n)) + residual; dweight = sum over rows of dy n, in parts of `rows_per` rows (a fixed order;
// reduce.hip adds the parts).
//   x, dy, y, dx, residual [R, C]; w [C] f32; rstd [R] f32; part [parts, C] f32. types: see each kernel.
// Launch: work-groups of 256. A row is taken by the work-group (rms_norm, rms_norm_backward), by a wave of it (_wave:
// rows of a few hundred elements) or by 16 lanes (_row16: heads, as in QK norm); dweight: (ceil(C / 256), parts), see
// columns.hpp. The first eight elements of a work-item stay in registers between the two passes over a row.
// Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
#include "columns.hpp"
#include "rows.hpp"

using namespace gpu;

template <u32 LANES>
GPU_FN void forward(const void* x, const float* w, void* y, float* rstd, u32 rows, u32 columns, float eps, u32 types,
                    float* memory) {
  Team<LANES> team(rows, memory);
  u64 row = u64(team.row) * columns, end = row + columns;
  u32 type = type_of(types, 0);
  bool aligned = columns % 8 == 0;
  Eight head = team.first < columns ? load8(x, type, row + team.first, end, aligned) : eight_zeros();
  float sum = 0.f;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Eight v = c == team.first ? head : load8(x, type, row + c, end, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += v.at[e] * v.at[e];
  }
  float r = 1.f / gpu::sqrt(team.sum(sum) / float(columns) + eps);
  if (!team.active) return;
  if (team.first == 0) rstd[team.row] = r;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Eight v = c == team.first ? head : load8(x, type, row + c, end, aligned);
    Eight weight = load8_of(w, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) v.at[e] = v.at[e] * r * weight.at[e];
    store8(y, type_of(types, 1), row + c, end, v, aligned);
  }
}

template <u32 LANES>
GPU_FN void backward(const void* dy, const void* x, const float* w, const float* rstd, const void* residual, void* dx,
                     u32 rows, u32 columns, u32 types, float* memory) {
  Team<LANES> team(rows, memory);
  u64 row = u64(team.row) * columns, end = row + columns;
  bool aligned = columns % 8 == 0;
  struct Pair {
    Eight g, n;  // dy w and x rstd
  };
  float r = rstd[team.row], sum = 0.f;
  auto read = [&](u32 c) {
    Pair p{load8(dy, type_of(types, 0), row + c, end, aligned), load8(x, type_of(types, 1), row + c, end, aligned)};
    Eight weight = load8_of(w, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) p.g.at[e] *= weight.at[e], p.n.at[e] *= r;
    return p;
  };
  Pair head{eight_zeros(), eight_zeros()};
  if (team.first < columns) head = read(team.first);
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Pair p = c == team.first ? head : read(c);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += p.g.at[e] * p.n.at[e];
  }
  float mean = team.sum(sum) / float(columns);
  if (!team.active) return;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Pair p = c == team.first ? head : read(c);
    Eight more = residual ? load8(residual, type_of(types, 2), row + c, end, aligned) : eight_zeros();
#pragma unroll
    for (u32 e = 0; e < 8; e++) more.at[e] += (p.g.at[e] - p.n.at[e] * mean) * r;
    store8(dx, type_of(types, 3), row + c, end, more, aligned);
  }
}

// types: x, y
#define FORWARD(name, lanes)                                                                                          \
  extern "C" GPU_KERNEL(256) void name(const void* x, const float* w, void* y, float* rstd, u32 rows, u32 columns,    \
                                       float eps, u32 types) {                                                        \
    GPU_SHARED(float, memory, 256 / GPU_WAVE);                                                                        \
    forward<lanes>(x, w, y, rstd, rows, columns, eps, types, memory);                                                 \
  }
FORWARD(rms_norm, 256)
FORWARD(rms_norm_wave, GPU_WAVE)
FORWARD(rms_norm_row16, 16)

// types: dy, x, residual, dx
#define BACKWARD(name, lanes)                                                                                         \
  extern "C" GPU_KERNEL(256) void name(const void* dy, const void* x, const float* w, const float* rstd,              \
                                       const void* residual, void* dx, u32 rows, u32 columns, u32 types) {            \
    GPU_SHARED(float, memory, 256 / GPU_WAVE);                                                                        \
    backward<lanes>(dy, x, w, rstd, residual, dx, rows, columns, types, memory);                                      \
  }
BACKWARD(rms_norm_backward, 256)
BACKWARD(rms_norm_backward_wave, GPU_WAVE)
BACKWARD(rms_norm_backward_row16, 16)

// types: dy, x
extern "C" GPU_KERNEL(256) void rms_norm_dweight(const void* dy, const void* x, const float* rstd, float* part,
                                                 u32 rows, u32 columns, u32 rows_per, u32 types) {
  GPU_SHARED(float, memory, COLUMN_MEMORY);
  u32 c = block_x() * 256 + thread(), first = block_y() * rows_per, last = min(first + rows_per, rows);
  bool aligned = columns % 8 == 0;
  float sum = column_sum(first, last, columns, memory, [&](u32 r, u32 column) {
    u64 row = u64(r) * columns, end = row + columns;
    Eight g = load8(dy, type_of(types, 0), row + column, end, aligned);
    Eight v = load8(x, type_of(types, 1), row + column, end, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) g.at[e] *= v.at[e] * rstd[r];
    return g;
  });
  if (c < columns) part[u64(block_y()) * columns + c] = sum;
}
