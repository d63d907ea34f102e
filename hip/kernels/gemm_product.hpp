// The product of two operands of 16 bits on the matrix unit, for gemm.hip and linear.hip.
//
// Pipeline of a group (both waves of a SIMD overlap; one barrier a tile):
//
//     memory --128-bit loads--> registers (tile t + 1) --decode, swizzle--> LDS buffer (t + 1) % 2
//                               LDS buffer t % 2 --128-bit reads--> fragments --> matrix unit
//
// The loads of tile t + 1 start before the matrix instructions of tile t; its stores stand between the last of them.
// What the loads of tile t + 2 depend on (the index of a nested scale) is loaded with them.
//
// CDNA: big 256 x 256 with 8 waves of 128 x 64 (128 accumulators a lane, 64 KiB of LDS, 2 waves a SIMD); small 128 x
// 128 with 4 waves of 64 x 64. RDNA: big 128 x 128 with 8 waves of 32 x 64; small 64 x 128 with 4 such waves.
//
// Sources: Goto and van de Geijn 2008 (blocking); AMD's instruction set manuals (fragments).
#pragma once
#include "gemm_epilogue.hpp"

namespace gemm {

enum Layout { NN, NT, TN };

template <int TILE_M_, int TILE_N_, int WAVE_M_> struct Shape {
  static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_, WAVE_M = WAVE_M_;
  static constexpr int WAVES = TILE_M / WAVE_M * (TILE_N / WAVE_N), THREADS = WAVES * GPU_WAVE;
  static constexpr int SLOTS = (TILE_M + TILE_N) * CHUNKS;  // of one of the two LDS buffers
  static constexpr int STAGE_SLOTS = WAVES * STAGE_FLOATS / 4, LDS = 2 * SLOTS > STAGE_SLOTS ? 2 * SLOTS : STAGE_SLOTS;
  static_assert(LDS * 16 <= 65536, "a work-group has 64 KiB");
};
#if GPU_CDNA
using Big = Shape<256, 256, 128>;
using Small = Shape<128, 128, 64>;
#else
using Big = Shape<128, 128, 32>;
using Small = Shape<64, 128, 32>;
#endif

template <class S, int ROWS, int THREADS, bool ALONG> struct Tile : AlongK<S, ROWS, THREADS> {
  using AlongK<S, ROWS, THREADS>::AlongK;
};
template <class S, int ROWS, int THREADS> struct Tile<S, ROWS, THREADS, false> : AcrossK<S, ROWS, THREADS> {
  using AcrossK<S, ROWS, THREADS>::AcrossK;
};

// acc += A B^T of one LDS buffer, for the wave whose rows of A and of B start at row_a and row_b. `meanwhile(i)` is
// done beside the i-th of STAGES stretches of matrix instructions: that is where the next tile is decoded and stored.
template <class U, class S> struct Product {
  static constexpr int TM = S::WAVE_M / 16, TN = WAVE_N / 16, STAGES = TM * U::LOADS;
  static constexpr int AHEAD = GPU_CDNA ? 2 : 1;  // fragments of A read before they are used
  typename U::Acc acc[TM][TN];

  template <class F> GPU_FN void multiply(const gpu::u32x4* lds, int row_a, int row_b, int lane, F meanwhile) {
#pragma unroll
    for (int part = 0; part < U::LOADS; ++part) {
      typename U::Fragment b[TN];
#pragma unroll
      for (int j = 0; j < TN; ++j) b[j] = U::load(lds + S::TILE_M * CHUNKS, row_b + 16 * j, part, lane);
      typename U::Fragment a[AHEAD + 1];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) a[i] = U::load(lds, row_a + 16 * i, part, lane);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        if (i + AHEAD < TM) a[(i + AHEAD) % (AHEAD + 1)] = U::load(lds, row_a + 16 * (i + AHEAD), part, lane);
#pragma unroll
        for (int s = 0; s < U::STEPS; ++s)
#pragma unroll
          for (int j = 0; j < TN; ++j) acc[i][j] = U::mma(s, a[i % (AHEAD + 1)], b[j], acc[i][j]);
        meanwhile(part * TM + i);
      }
    }
  }
};

template <class T, class S, Layout L, class SourceA, class SourceB>
GPU_FN void product(const SourceA& source_a, const SourceB& source_b, Epilogue e, int k, int k_per_split, long stride_a,
                    long stride_b, gpu::u32x4* lds) {
  using U = Unit<T>;
  const int thread = gpu::thread(), lane = gpu::lane(), wave = gpu::wave();
  const int m0 = gpu::block_y() * S::TILE_M, n0 = gpu::block_x() * S::TILE_N, z = gpu::block_z();
  const bool split = k_per_split > 0;
  const int begin = split ? z * k_per_split : 0, end = split && begin + k_per_split < k ? begin + k_per_split : k;
  if (split && z > 0) e.rank = 0;

  Tile<SourceA, S::TILE_M, S::THREADS, L != TN> a(source_a, split ? 0 : z * stride_a, m0, e.m, k, thread);
  Tile<SourceB, S::TILE_N, S::THREADS, L == NT> b(source_b, split ? 0 : z * stride_b, n0, e.n, k, thread);
  const int row_a = wave / (S::TILE_N / WAVE_N) * S::WAVE_M, row_b = wave % (S::TILE_N / WAVE_N) * WAVE_N;
  using P = Product<U, S>;
  P p;
#pragma unroll
  for (int i = 0; i < P::TM; ++i)
#pragma unroll
    for (int j = 0; j < P::TN; ++j) p.acc[i][j] = typename U::Acc(0.0f);
  // Stores of the next tile, one load of each thread at a time; the last stretches of a tile have one or more each.
  // What is long to decode goes first, and begins EARLY stretches sooner: CDNA then still has matrix instructions
  // beside it.
  using A = decltype(a);
  using B = decltype(b);
  constexpr int STORES = A::LOADS + B::LOADS, EARLY = !GPU_CDNA || !SourceB::DECODES ? 0 : L == NT ? 2 : 1;
  constexpr int FIRST = P::STAGES > STORES + EARLY ? P::STAGES - STORES - EARLY : 0;
  constexpr int LAST = P::STAGES - FIRST - (EARLY > 0);
  constexpr int FRONT = EARLY > 0 ? B::LOADS : 0;  // loads of B before those of A
  const auto store = [&](int i, int to, int k0) {
    if (i < FRONT) b.store(lds + to + S::TILE_M * CHUNKS, k0, thread, i);
    else if (i < FRONT + A::LOADS) a.store(lds + to, k0, thread, i - FRONT);
    else b.store(lds + to + S::TILE_M * CHUNKS, k0, thread, i - A::LOADS);
  };

  const auto after = [&](int k0) { return k0 + DEPTH < end ? k0 + DEPTH : k0; };
  if (begin < end) {
    a.fetch(begin, thread);
    b.look(begin, thread);
    b.fetch(begin, thread);
    b.look(after(begin), thread);
#pragma unroll
    for (int i = 0; i < STORES; ++i) store(i, 0, begin);
  }
  gpu::local_barrier();
  int now = 0;
#pragma unroll 1
  for (int k0 = begin; k0 < end; k0 += DEPTH) {
    // The last tile is fetched once more instead of one beyond it: no branch in the loop, and the copy is not used.
    const int next = after(k0);
    a.fetch(next, thread);
    b.fetch(next, thread);
    b.look(after(next), thread);
    gpu::sched_fence();
    const int other = S::SLOTS - now;
    p.multiply(lds + now, row_a, row_b, lane, [&](int stage) {
      if (!GPU_CDNA) gpu::sched_fence();  // RDNA: or fragments pile up; CDNA: the compiler mixes better without
      if (stage < FIRST) return;
#pragma unroll
      for (int i = 0; i < STORES; ++i)
        if (i * LAST / STORES == stage - FIRST) store(i, other, next);
    });
    now = other;
    gpu::local_barrier();
  }
  epilogue<U, P::TM, P::TN>(e, p.acc, (float*)lds + wave * STAGE_FLOATS, m0 + row_a, n0 + row_b, lane,
                                           (long)z * e.m * e.n);
}

}  // namespace gemm

