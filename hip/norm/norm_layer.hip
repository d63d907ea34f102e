// LayerNorm. Forward: rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = (x - mean) rstd w + b. Backward, with g = dy w and
// n = (x - mean) rstd: dx = rstd (g - mean(g) - n mean(g n)); dweight = sum over rows of dy n, in parts of `rows_per`
// rows (a fixed order; reduce.hip adds the parts, and the rows of dy: dbias).
//   x, dy, y, dx [R, C]; w, b [C] f32; mean, rstd [R] f32; part [parts, C] f32. types: see each kernel.
// Launch: work-groups of 256. A row is taken by the work-group (layer_norm, layer_norm_backward), by a wave of it
// (_wave) or by 16 lanes (_row16); dweight: (ceil(C / 256), parts), see columns.hpp. The first eight elements of a
// work-item stay in registers from one pass over a row to the next.
// Source: Ba, Kiros and Hinton, Layer Normalization (2016).
#include "columns.hpp"
#include "rows.hpp"

using namespace gpu;

template <u32 LANES>
GPU_FN void forward(const void* x, const float* w, const float* b, void* y, float* mean, float* rstd, u32 rows,
                    u32 columns, float eps, u32 types, float* memory) {
  Team<LANES> team(rows, memory);
  u64 row = u64(team.row) * columns, end = row + columns;
  bool aligned = columns % 8 == 0;
  Eight head = eight_zeros();
  if (team.first < columns) head = load8(x, type_of(types, 0), row + team.first, end, aligned);
  auto read = [&](u32 c) {
    return c == team.first ? head : load8(x, type_of(types, 0), row + c, end, aligned);
  };
  float total = 0.f;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Eight v = read(c);
#pragma unroll
    for (u32 e = 0; e < 8; e++) total += v.at[e];
  }
  // The rounded mean `near` is imprecise where it is large relative to the deviation: add the mean of x - near.
  float near = team.sum(total) / float(columns), missed = 0.f, squares = 0.f;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Eight v = read(c);
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      float d = c + e < columns ? v.at[e] - near : 0.f;
      missed += d;
      squares += d * d;
    }
  }
  float rest = team.sum(missed) / float(columns), variance = team.sum(squares) / float(columns) - rest * rest;
  float r = 1.f / gpu::sqrt(max(variance, 0.f) + eps);
  if (!team.active) return;
  if (team.first == 0) mean[team.row] = near + rest, rstd[team.row] = r;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Eight v = read(c);
    Eight weight = load8_of(w, c, columns, aligned), bias = load8_of(b, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) v.at[e] = (v.at[e] - near - rest) * r * weight.at[e] + bias.at[e];
    store8(y, type_of(types, 1), row + c, end, v, aligned);
  }
}

template <u32 LANES>
GPU_FN void backward(const void* dy, const void* x, const float* w, const float* mean, const float* rstd, void* dx,
                     u32 rows, u32 columns, u32 types, float* memory) {
  Team<LANES> team(rows, memory);
  u64 row = u64(team.row) * columns, end = row + columns;
  bool aligned = columns % 8 == 0;
  struct Pair {
    Eight g, n;
  };
  float m = mean[team.row], r = rstd[team.row], total = 0.f, along = 0.f;
  auto read = [&](u32 c) {
    Pair p{load8(dy, type_of(types, 0), row + c, end, aligned), load8(x, type_of(types, 1), row + c, end, aligned)};
    Eight weight = load8_of(w, c, columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) p.g.at[e] *= weight.at[e], p.n.at[e] = (p.n.at[e] - m) * r;
    return p;
  };
  Pair head{eight_zeros(), eight_zeros()};
  if (team.first < columns) head = read(team.first);
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Pair p = c == team.first ? head : read(c);
#pragma unroll
    for (u32 e = 0; e < 8; e++) total += p.g.at[e], along += p.g.at[e] * p.n.at[e];  // g is 0 past the end
  }
  float g_mean = team.sum(total) / float(columns), k = team.sum(along) / float(columns);
  if (!team.active) return;
  for (u32 c = team.first; c < columns; c += LANES * 8) {
    Pair p = c == team.first ? head : read(c);
#pragma unroll
    for (u32 e = 0; e < 8; e++) p.g.at[e] = (p.g.at[e] - g_mean - p.n.at[e] * k) * r;
    store8(dx, type_of(types, 2), row + c, end, p.g, aligned);
  }
}

// types: x, y
#define FORWARD(name, lanes)                                                                                          \
  extern "C" GPU_KERNEL(256) void name(const void* x, const float* w, const float* b, void* y, float* mean,           \
                                       float* rstd, u32 rows, u32 columns, float eps, u32 types) {                    \
    GPU_SHARED(float, memory, 256 / GPU_WAVE);                                                                        \
    forward<lanes>(x, w, b, y, mean, rstd, rows, columns, eps, types, memory);                                        \
  }
FORWARD(layer_norm, 256)
FORWARD(layer_norm_wave, GPU_WAVE)
FORWARD(layer_norm_row16, 16)

// types: dy, x, dx
#define BACKWARD(name, lanes)                                                                                         \
  extern "C" GPU_KERNEL(256) void name(const void* dy, const void* x, const float* w, const float* mean,              \
                                       const float* rstd, void* dx, u32 rows, u32 columns, u32 types) {               \
    GPU_SHARED(float, memory, 256 / GPU_WAVE);                                                                        \
    backward<lanes>(dy, x, w, mean, rstd, dx, rows, columns, types, memory);                                          \
  }
BACKWARD(layer_norm_backward, 256)
BACKWARD(layer_norm_backward_wave, GPU_WAVE)
BACKWARD(layer_norm_backward_row16, 16)

// types: dy, x
extern "C" GPU_KERNEL(256) void layer_norm_dweight(const void* dy, const void* x, const float* mean, const float* rstd,
                                                   float* part, u32 rows, u32 columns, u32 rows_per, u32 types) {
  GPU_SHARED(float, memory, COLUMN_MEMORY);
  u32 c = block_x() * 256 + thread(), first = block_y() * rows_per, last = min(first + rows_per, rows);
  bool aligned = columns % 8 == 0;
  float sum = column_sum(first, last, columns, memory, [&](u32 r, u32 column) {
    u64 row = u64(r) * columns, end = row + columns;
    Eight g = load8(dy, type_of(types, 0), row + column, end, aligned);
    Eight v = load8(x, type_of(types, 1), row + column, end, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) g.at[e] *= (v.at[e] - mean[r]) * rstd[r];
    return g;
  });
  if (c < columns) part[u64(block_y()) * columns + c] = sum;
}
