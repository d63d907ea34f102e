// Sums in two passes of a fixed order. sum_rows: [R, C] -> [parts, C], each part `rows_per` rows (then again, with one
// part), added to what is in `out` when `accumulate`. sum: [n] -> [work-groups] (then again, with one).
//   x f32, f16 or bf16; out f32, f16 or bf16 (types: x, out).
// Launch: sum_rows (ceil(C / 256), parts) work-groups of 256 (columns.hpp); sum: any number of work-groups of 256.
#include "columns.hpp"

using namespace gpu;

extern "C" GPU_KERNEL(256) void sum_rows(const void* x, void* out, u32 rows, u32 columns, u32 rows_per, u32 accumulate,
                                         u32 types) {
  GPU_SHARED(float, memory, COLUMN_MEMORY);
  u32 c = block_x() * 256 + thread(), first = block_y() * rows_per, last = min(first + rows_per, rows);
  bool aligned = columns % 8 == 0;
  float sum = column_sum(first, last, columns, memory, [&](u32 r, u32 column) {
    u64 row = u64(r) * columns;
    return load8(x, type_of(types, 0), row + column, row + columns, aligned);
  });
  if (c >= columns) return;
  u64 at = u64(block_y()) * columns + c;
  if (accumulate) sum += load(out, type_of(types, 1), at);
  store(out, type_of(types, 1), at, sum);
}

extern "C" GPU_KERNEL(256) void sum(const void* x, float* out, u64 n, u32 types) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  float total = 0.f;
  for (u64 i = (u64(block_x()) * 256 + thread()) * 8; i < n; i += u64(grid_x()) * 2048) {
    Eight v = load8(x, type_of(types, 0), i, n);
    total += ((v.at[0] + v.at[1]) + (v.at[2] + v.at[3])) + ((v.at[4] + v.at[5]) + (v.at[6] + v.at[7]));
  }
  total = block_sum<256>(total, memory);
  if (thread() == 0) out[block_x()] = total;
}
