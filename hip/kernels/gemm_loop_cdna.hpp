// The loop over K of a product on CDNA (gemm_product.hpp): all waves of a SIMD are busy with both kinds of work at once.
//
//     tile t:  | rows of fragments 0 .. TM - TAIL - 1 of the wave                     | barrier | the last TAIL rows     |
//              | beside each matrix instruction a little of this, as `beside` says:   |         | fragments of t + 1:    |
//              | words of t + 1 decoded and stored into the other LDS buffer, then    |         | LDS -> the registers   |
//              | their registers loaded again, with t + 2 (and what t + 3 waits for)  |         | that become free       |
//
// So nothing waits for LDS behind the barrier, and loads from memory have most of a tile's time.
#pragma once
#include "gemm_tile.hpp"

namespace gemm {

// f(n) for n of FROM .. TO - 1, each known to the compiler as n.value.
template <int N> struct Constant {
  static constexpr int value = N;
};
template <int FROM, int TO, class F> GPU_FN void each(F f) {
  if constexpr (FROM < TO) {
    f(Constant<FROM>{});
    each<FROM + 1, TO>(f);
  }
}

template <class U, class S> struct Product {
  static constexpr int TM = S::WAVE_M / 16, TN = S::WAVE_N / 16, RING = 4, TAIL = TM / 4;
  static constexpr int BEFORE = U::STEPS * TN * (TM - TAIL), GRAIN = BEFORE / 24;  // matrix instructions
  static_assert(U::LOADS == 1 && TM % RING == 0 && BEFORE % 24 == 0, "a fragment is 16 rows x DEPTH");
  typename U::Acc acc[TM][TN];
  typename U::Fragment a[RING], b[TN];

  template <class A, class B>
  GPU_FN void run(A& tile_a, B& tile_b, gpu::u32x4* lds, int row_a, int row_b, int begin, int end) {
    constexpr bool ZERO = !B::DECODES;
    const int thread = gpu::thread(), at = slot(gpu::lane() % 16, gpu::lane() / 16);
    const int lane_a = 16 * (4 * row_a + at), lane_b = 16 * (S::TILE_M * CHUNKS + 4 * row_b + at);  // bytes
    const auto after = [&](int k0) { return k0 + DEPTH < end ? k0 + DEPTH : k0; };
    fetch_all(tile_a, begin, thread);
    look_all(tile_b, begin, thread);
    fetch_all(tile_b, begin, thread);
    look_all(tile_b, after(begin), thread);
    store<ZERO>(tile_a, lds, begin, thread, 0, A::OWNED);
    store<ZERO>(tile_b, lds + S::TILE_M * CHUNKS, begin, thread, 0, B::OWNED);
    fetch_all(tile_a, after(begin), thread);
    fetch_all(tile_b, after(begin), thread);
    look_all(tile_b, after(after(begin)), thread);
    gpu::local_barrier();
#pragma unroll
    for (int i = 0; i < TAIL; ++i) a[i] = fragment(lds, lane_a, i);
#pragma unroll
    for (int j = 0; j < TN; ++j) b[j] = fragment(lds, lane_b, j);
    int now = 0;
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += DEPTH) {
      // The last tile is fetched again instead of one beyond it: no branch in the loop, and the copy is not used.
      const int next = after(k0), later = after(next), other = S::SLOTS - now;
      body(lds, gpu::optimization_barrier(16 * now + lane_a),
           [&](auto n) { beside<n.value>(tile_a, tile_b, lds + other, next, later, after(later), thread); });
      gpu::local_barrier();
      now = other;
      tail(lds, gpu::optimization_barrier(16 * now + lane_a), gpu::optimization_barrier(16 * now + lane_b));
    }
  }

  // `at`: bytes from lds to the lane's part of fragment 0.
  GPU_FN static typename U::Fragment fragment(const gpu::u32x4* lds, int at, int i) {
    return *(const typename U::Fragment*)((const char*)lds + at + 1024 * i);
  }

  template <class F> GPU_FN void body(const gpu::u32x4* lds, int at_a, F meanwhile) {
    each<0, BEFORE>([&](auto n) {
      constexpr int i = n.value / (U::STEPS * TN), s = n.value / TN % U::STEPS, j = n.value % TN;
      if constexpr (n.value % (U::STEPS * TN) == 0) a[(i + TAIL) % RING] = fragment(lds, at_a, i + TAIL);
      acc[i][j] = U::mma(s, a[i % RING], b[j], acc[i][j]);
      meanwhile(n);
      gpu::sched_fence();
    });
  }

  GPU_FN void tail(const gpu::u32x4* lds, int at_a, int at_b) {
#pragma unroll
    for (int i = 0; i < TAIL; ++i) a[i] = fragment(lds, at_a, i);
#pragma unroll
    for (int j = 0; j < TN; ++j) {
#pragma unroll
      for (int s = 0; s < U::STEPS; ++s)
#pragma unroll
        for (int i = TM - TAIL; i < TM; ++i) acc[i][j] = U::mma(s, a[i % RING], b[j], acc[i][j]);
      b[j] = fragment(lds, at_b, j);
      gpu::sched_fence();
    }
  }

  // What is done beside matrix instruction n of BEFORE. A decoded word is looked up some time before it is made, and loads
  // are spread: L1 takes 64 bytes a clock.
  template <int n, class A, class B>
  GPU_FN static void beside(A& tile_a, B& tile_b, gpu::u32x4* lds, int next, int later, int last, int thread) {
    static_assert(A::OWNED == 2 && B::OWNED == 2, "BEFORE is divided among them");
    constexpr bool DECODES = B::DECODES, ZERO = !DECODES;
    constexpr int OPEN_B = DECODES ? 0 : 8, MAKE_A = DECODES ? 2 : 0, MAKE_B = DECODES ? 5 : 8, STEP_B = DECODES ? 2 : 1;
    constexpr int FETCH_A = DECODES ? 10 : 8, FETCH_B = DECODES ? 8 : 16;
    each<0, 2>([&](auto i) {
      if constexpr (n == GRAIN * MAKE_A) tile_a.open(next, thread, i.value);
      if constexpr (n == GRAIN * OPEN_B) tile_b.open(next, thread, i.value);
    });
    each<0, 8>([&](auto word) {
      if constexpr (n == GRAIN * word.value) tile_b.look_up(word.value);
      if constexpr (n == GRAIN * (MAKE_A + word.value)) tile_a.template make<ZERO>(lds, next, thread, word.value);
      if constexpr (n == GRAIN * (MAKE_B + STEP_B * word.value))
        tile_b.template make<ZERO>(lds + S::TILE_M * CHUNKS, next, thread, word.value);
    });
    each<0, 2>([&](auto i) {
      if constexpr (n == GRAIN * (FETCH_A + 3 * i.value)) tile_a.fetch(later, thread, i.value);
      if constexpr (n == GRAIN * (FETCH_B + 2 * i.value)) tile_b.fetch(later, thread, i.value);
      if constexpr (n == GRAIN * (FETCH_B + 2 * (2 + i.value))) tile_b.look(last, thread, i.value);
    });
  }
};

}  // namespace gemm
