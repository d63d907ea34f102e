// Pairs of neighboring waves, each with half of the head width. A wave's partial sums of a tile of scores go to the
// other wave of the pair through LDS and are added there. a + b = b + a exactly, so both waves hold the same bits.
#pragma once
#include "attention_matrix.hpp"

namespace attention {

constexpr int HANDED_TILE = 64;  // slots of 128 bits that a tile takes

// A barrier that waits for LDS only; the compiler moves no instruction across it.
GPU_FN void meet() {
  gpu::sched_fence();
  gpu::lds_barrier();
  gpu::sched_fence();
}

// `to`, `from`: a tile's first slot. Lanes store 128 bits each, side by side.
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
