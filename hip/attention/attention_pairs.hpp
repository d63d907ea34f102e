// Waves of a work-group that wait for each other, and neighbouring waves that have a half of the width each: what a
// wave makes of a tile of scores goes to the other of its pair through LDS, and the other's part is added to it. The
// sum of two has the same bits in both.
#pragma once
#include "attention_matrix.hpp"

namespace attention {

constexpr int HANDED_TILE = 64;  // slots of 128 bits that a tile takes

// LDS alone is waited for; nothing is moved across.
GPU_FN void meet() {
  gpu::sched_fence();
  gpu::lds_barrier();
  gpu::sched_fence();
}

// `to`, `from`: of a tile. 128 bits of a lane lie beside those of the next.
GPU_FN void hand_over(u32x4* to, const Acc& tile) {
  const u32 lane = optimization_barrier(gpu::lane());
#pragma unroll
  for (int e = 0; e < ELEMENTS; e += 4) {
    const gpu::f32x4 four{tile[e], tile[e + 1], tile[e + 2], tile[e + 3]};
    to[e / 4 * GPU_WAVE + lane] = __builtin_bit_cast(u32x4, four);
  }
}
GPU_FN void add_handed(Acc& tile, const u32x4* from) {
  const u32 lane = optimization_barrier(gpu::lane());
#pragma unroll
  for (int e = 0; e < ELEMENTS; e += 4) {
    const auto four = __builtin_bit_cast(gpu::f32x4, from[e / 4 * GPU_WAVE + lane]);
#pragma unroll
    for (int i = 0; i < 4; i++) tile[e + i] += four[i];
  }
}

}  // namespace attention
