// The loop over K of a GEMM on RDNA (gemm_product.hpp): two or more waves of a SIMD overlap; one barrier per tile.
//
//     memory --128-bit loads--> registers (tile t + 1) --decode, swizzle--> LDS buffer (t + 1) % 2
//                               LDS buffer t % 2 --128-bit reads--> fragments --> tensor cores
//
// The loads of tile t + 1 start before the matrix instructions of tile t; its stores stand between the last of them.
// What the loads of tile t + 2 depend on (the index of a nested scale) is loaded with them.
#pragma once
#include "gemm_tile.hpp"

namespace gemm {

template <class U, class S> struct Product {
  static constexpr int TM = S::WAVE_M / 16, TN = S::WAVE_N / 16, STAGES = TM * U::LOADS;
  typename U::Acc acc[TM][TN];

  template <class A, class B>
  GPU_FN void run(A& tile_a, B& tile_b, gpu::u32x4* lds, int row_a, int row_b, int begin, int end) {
    // Stores of the next tile, one load of each thread at a time; the last stretches of a tile have one or more each.
    constexpr int STORES = A::LOADS + B::LOADS, FIRST = STAGES > STORES ? STAGES - STORES : 0, LAST = STAGES - FIRST;
    constexpr bool ZERO = !B::DECODES;
    const int thread = gpu::thread();
    const auto put = [&](int i, gpu::u32x4* to, int k0) {
      constexpr int A_EACH = A::OWNED / A::LOADS, B_EACH = B::OWNED / B::LOADS;
      const int j = i - A::LOADS;
      if (i < A::LOADS) store<ZERO>(tile_a, to, k0, thread, i * A_EACH, (i + 1) * A_EACH);
      else store<ZERO>(tile_b, to + S::TILE_M * CHUNKS, k0, thread, j * B_EACH, (j + 1) * B_EACH);
    };
    const auto after = [&](int k0) { return k0 + DEPTH < end ? k0 + DEPTH : k0; };
    fetch_all(tile_a, begin, thread);
    look_all(tile_b, begin, thread);
    fetch_all(tile_b, begin, thread);
    look_all(tile_b, after(begin), thread);
#pragma unroll
    for (int i = 0; i < STORES; ++i) put(i, lds, begin);
    gpu::local_barrier();
    int now = 0;
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += DEPTH) {
      // The last tile is fetched once more instead of one beyond it: no branch in the loop, and the copy is not used.
      const int next = after(k0);
      fetch_all(tile_a, next, thread);
      fetch_all(tile_b, next, thread);
      look_all(tile_b, after(next), thread);
      gpu::sched_fence();
      const int other = S::SLOTS - now;
      multiply(lds + now, row_a, row_b, [&](int stage) {
        gpu::sched_fence();  // or fragments pile up
        if (stage < FIRST) return;
#pragma unroll
        for (int i = 0; i < STORES; ++i)
          if (i * LAST / STORES == stage - FIRST) put(i, lds + other, next);
      });
      now = other;
      gpu::local_barrier();
    }
  }

  // acc += A B^T of one LDS buffer. `meanwhile(i)` is called during the i-th of STAGES groups of matrix instructions.
  template <class F> GPU_FN void multiply(const gpu::u32x4* lds, int row_a, int row_b, F meanwhile) {
    const int lane = gpu::lane();
#pragma unroll
    for (int part = 0; part < U::LOADS; ++part) {
      typename U::Fragment b[TN], a[2];
#pragma unroll
      for (int j = 0; j < TN; ++j) b[j] = U::load(lds + S::TILE_M * CHUNKS, row_b + 16 * j, part, lane);
      a[0] = U::load(lds, row_a, part, lane);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        if (i + 1 < TM) a[(i + 1) % 2] = U::load(lds, row_a + 16 * (i + 1), part, lane);
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = U::mma(0, a[i % 2], b[j], acc[i][j]);
        meanwhile(part * TM + i);
      }
    }
  }
};

}  // namespace gemm
