// The loop over K of a GEMM on CDNA (gemm_product.hpp): each wave overlaps matrix instructions with loads and
// decoding.
//
// An iteration takes 64 of K: an even tile t and the next, odd one, each with an LDS buffer and registers of its own:
//
//     even t:     | rows of fragments 0 .. TM - TAIL - 1 of the wave               | barrier | the last TAIL rows   |
//                 | with each matrix instruction a little of this:                 |         | fragments of t + 1:  |
//                 | words of t + 1 decoded and stored into its LDS buffer          |         | LDS -> the registers |
//                 | (`beside`); registers of both tiles loaded again, with t + 2   |         | that become free     |
//                 | and t + 3 (`load`)                                             |         |                      |
//     odd t + 1:  | the same, with words of t + 2 and no loads                     | barrier | fragments of t + 2   |
//
// So nothing waits for LDS after a barrier, and loads from memory have most of a tile's time to arrive. A row
// of 64 is a line of 128 bytes: its second half is loaded shortly after the first, while L1 still has the line.
#pragma once
#include "gemm_tile.hpp"

namespace gemm {

// f(n) for n of 0 .. COUNT - 1, inlined and constant early on a GPU: if a loop were unrolled later, tiles would be in
// memory, not in registers. For the emulated GPU it is a loop, which compiles in half the time.
#ifdef GPU_HOST
template <int COUNT, class F> GPU_FN void each(F f) {
  for (int n = 0; n < COUNT; ++n) f(n);
}
#else
template <int COUNT, int FROM = 0, class F> GPU_FN void each(F f) {
  if constexpr (FROM < COUNT) {
    f(FROM);
    each<COUNT, FROM + 1>(f);
  }
}
#endif

template <class U, class S> struct Product {
  static constexpr int TM = S::WAVE_M / 16, TN = S::WAVE_N / 16, RING = 4, TAIL = TM / 4;
  static constexpr int BEFORE = U::STEPS * TN * (TM - TAIL), GRAIN = BEFORE / 24;  // matrix instructions
  // A line's second half is loaded so many of BEFORE's 24 parts after its first, when its registers are free.
  static constexpr int ODD_LAG = 5;
  static_assert(U::LOADS == 1 && TM % RING == 0 && BEFORE % 24 == 0, "a fragment is 16 rows x DEPTH");
  typename U::Acc acc[TM][TN];
  typename U::Fragment a[RING], b[TN];

  // begin: a multiple of 64, as is end, where it is not K.
  template <class A, class B>
  GPU_FN void run(A& even_a, B& even_b, gpu::u32x4* lds, int row_a, int row_b, int begin, int end) {
    constexpr bool ZERO = !B::DECODES;
    A odd_a = even_a;
    B odd_b = even_b;
    gpu::u32x4* const odd_lds = lds + S::SLOTS;
    const int thread = gpu::thread(), at = slot(gpu::lane() % 16, gpu::lane() / 16);
    const int lane_a = 16 * (4 * row_a + at), lane_b = 16 * (S::TILE_M * CHUNKS + 4 * row_b + at);  // bytes
    const auto after = [&](int k0) { return k0 + 2 * DEPTH < end ? k0 + 2 * DEPTH : k0; };
    const auto odd = [&](int k0) { return k0 + DEPTH < end ? k0 + DEPTH : k0; };  // where it may be read
    const int second = after(begin);
    look_all(even_b, begin, thread);
    look_all(odd_b, odd(begin), thread);
    fetch_all(even_a, begin, thread);
    fetch_all(even_b, begin, thread);
    fetch_all(odd_a, odd(begin), thread);
    fetch_all(odd_b, odd(begin), thread);
    look_all(even_b, second, thread);
    look_all(odd_b, odd(second), thread);
    store<ZERO>(even_a, lds, begin, thread, 0, A::OWNED);
    store<ZERO>(even_b, lds + S::TILE_M * CHUNKS, begin, thread, 0, B::OWNED);
    gpu::local_barrier();
#pragma unroll
    for (int i = 0; i < TAIL; ++i) a[i] = fragment(lds, lane_a, i);
#pragma unroll
    for (int j = 0; j < TN; ++j) b[j] = fragment(lds, lane_b, j);
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += 2 * DEPTH) {
      // The last tiles are fetched again instead of those beyond: no branch in the loop, and the copy is not used.
      const int next = after(k0), later = after(next);
      // Multiplies `from` while tile `k` goes into `to`. Inlined early, or the tiles would be in memory, not registers.
      const auto half = [&](const gpu::u32x4* from, gpu::u32x4* to, A& tile_a, B& tile_b, int k,
                            bool loads) __attribute__((always_inline)) {
        body(from, lane_a, [&](int part) {
          beside(part, tile_a, tile_b, to, k, thread);
          if (loads) {
            load(part, even_a, even_b, next, later, thread);
            load(part - ODD_LAG, odd_a, odd_b, odd(next), odd(later), thread);
          }
        });
        gpu::local_barrier();
        tail(to, lane_a, lane_b);
      };
      half(lds, odd_lds, odd_a, odd_b, k0 + DEPTH, true);
      half(odd_lds, lds, even_a, even_b, next, false);
    }
  }

  // `at`: bytes from lds to the lane's part of fragment 0.
  GPU_FN static typename U::Fragment fragment(const gpu::u32x4* lds, int at, int i) {
    return *(const typename U::Fragment*)((const char*)lds + at + 1024 * i);
  }

  template <class F> GPU_FN void body(const gpu::u32x4* lds, int at_a, F meanwhile) {
    each<24>([&](int part) {
#pragma unroll
      for (int n = GRAIN * part; n < GRAIN * (part + 1); ++n) {
        const int i = n / (U::STEPS * TN), s = n / TN % U::STEPS, j = n % TN;
        if (n % (U::STEPS * TN) == 0) a[(i + TAIL) % RING] = fragment(lds, at_a, i + TAIL);
        acc[i][j] = U::mma(s, a[i % RING], b[j], acc[i][j]);
        if (n % GRAIN == 0) meanwhile(part);
        gpu::sched_fence();
      }
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

  // The work on the tile at k0, which has arrived, that goes with the first matrix instruction of a part of BEFORE. A
  // decoded word is looked up some time before it is made.
  template <class A, class B>
  GPU_FN static void beside(int part, A& tile_a, B& tile_b, gpu::u32x4* lds, int k0, int thread) {
    static_assert(A::OWNED == 2 && B::OWNED == 2, "BEFORE is divided among them");
    constexpr bool DECODES = B::DECODES, ZERO = !DECODES;
    constexpr int OPEN_B = DECODES ? 0 : 8, MAKE_A = DECODES ? 2 : 0;
    constexpr int MAKE_B = DECODES ? 5 : 8, STEP_B = DECODES ? 2 : 1;
    each<2>([&](int i) {
      if (part == MAKE_A) tile_a.open(k0, thread, i);
      if (part == OPEN_B) tile_b.open(k0, thread, i);
    });
    each<8>([&](int word) {
      if (part == word) tile_b.look_up(word);
      if (part == MAKE_A + word) tile_a.template make<ZERO>(lds, k0, thread, word);
      if (part == MAKE_B + STEP_B * word)
        tile_b.template make<ZERO>(lds + S::TILE_M * CHUNKS, k0, thread, word);
    });
  }
  // The loads that go with it: of a tile, and of what the loads of the tile after it depend on. They are spread, as L1
  // takes 64 bytes per clock.
  template <class A, class B>
  GPU_FN static void load(int part, A& tile_a, B& tile_b, int next, int later, int thread) {
    static_assert(18 + ODD_LAG < 24, "beside one of BEFORE");
    each<2>([&](int i) {
      if (part == 6 * i) tile_a.fetch(next, thread, i);
      if (part == 12 + 6 * i) {
        tile_b.fetch(next, thread, i);
        tile_b.look(later, thread, i);
      }
    });
  }
};

}  // namespace gemm
