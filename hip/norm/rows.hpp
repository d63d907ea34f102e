// How rows of a matrix are divided among work-groups of 256: a row per work-group, per wave or per 16 lanes.
#pragma once

#include "elements.hpp"

namespace gpu {

// LANES work-items for a row: their numbers, and the sum over them.
template <u32 LANES>
struct Team {
  u32 row, first;  // the row, and the first column of this work-item
  bool active;
  float* memory;

  GPU_FN Team(u32 rows, float* lds) : memory(lds) {
    row = block_x() * (256 / LANES) + thread() / LANES;
    active = row < rows;
    row = min(row, rows - 1);  // all lanes take part in the sum
    first = thread() % LANES * 8;
  }
  GPU_FN float sum(float x) const {
    if constexpr (LANES == 16) return row_reduce(x, Sum{});
    if constexpr (LANES == GPU_WAVE) return wave_sum(x);
    return block_sum<256>(x, memory);
  }
};

}  // namespace gpu
