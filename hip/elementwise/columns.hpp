// Sums over rows of 256 columns, by a work-group of 256: 32 work-items take eight columns each (128-bit loads), and
// eight such slots take every eighth row; the slots are added in order.
#pragma once

#include "elements.hpp"

namespace gpu {

constexpr u32 COLUMN_SLOTS = 8;
// Two halves of a slot, each 32 x 4 columns, lie 144 apart: the final reads then use every bank once.
constexpr u32 COLUMN_HALF = 144, COLUMN_MEMORY = COLUMN_SLOTS * 2 * COLUMN_HALF;

// Column block_x() * 256 + thread() of the sum over rows first <= r < last of at(r, c), which gives columns c to c + 7.
// memory: [COLUMN_MEMORY] in LDS. Every work-item must call this; for a column past the end the result is undefined.
template <class F>
GPU_FN float column_sum(u32 first, u32 last, u32 columns, float* memory, F at) {
  u32 group = thread() % 32, slot = thread() / 32, c = block_x() * 256 + group * 8;
  Eight sum = eight_zeros();
  if (c < columns) {
    for (u32 r = first + slot; r < last; r += COLUMN_SLOTS) {
      Eight v = at(r, c);
#pragma unroll
      for (u32 e = 0; e < 8; e++) sum.at[e] += v.at[e];
    }
  }
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const float* part = sum.at + 4 * half;
    store16(memory + (slot * 2 + half) * COLUMN_HALF + group * 4, f32x4{part[0], part[1], part[2], part[3]});
  }
  barrier();
  u32 place = thread() % 8 / 4 * COLUMN_HALF + thread() / 8 * 4 + thread() % 4;
  float total = 0.f;
#pragma unroll
  for (u32 s = 0; s < COLUMN_SLOTS; s++) total += memory[s * 2 * COLUMN_HALF + place];
  return total;
}

}  // namespace gpu
