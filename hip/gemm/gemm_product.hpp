// The GEMM of two 16-bit operands on the tensor cores, for gemm.hip, linear.hip and gemm_grouped.hip.
//
// Tiles of both operands are in LDS twice: one is multiplied while the next is loaded. gemm_loop_cdna.hpp and
// gemm_loop_rdna.hpp say in which order.
//
// CDNA: big 256 x 256 with 8 waves of 128 x 64 (128 accumulators per lane, 64 KiB of LDS, 2 waves per SIMD); small 128
// x 128 with 4 waves of 64 x 64. RDNA: big 128 x 128 with 8 waves of 32 x 64; small 64 x 128 with 4 such waves.
//
// Sources: Goto and van de Geijn 2008 (blocking); AMD's instruction set manuals (fragments).
#pragma once
#include "gemm_epilogue.hpp"
#include "gemm_place.hpp"
#if GPU_CDNA
#include "gemm_loop_cdna.hpp"
#else
#include "gemm_loop_rdna.hpp"
#endif

namespace gemm {

enum Layout { NN, NT, TN };

template <int TILE_M_, int TILE_N_, int WAVE_M_> struct Shape {
  static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_, WAVE_M = WAVE_M_, WAVE_N = gemm::WAVE_N;
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

template <class T, class S, Layout L, class SourceA, class SourceB, class Where = OfGrid>
GPU_FN void product(const SourceA& source_a, const SourceB& source_b, Epilogue e, int k, int k_per_split, long stride_a,
                    long stride_b, gpu::u32x4* lds, const Where& where = {}) {
  using U = Unit<T>;
  const int thread = gpu::thread(), lane = gpu::lane(), wave = gpu::wave();
  const int m0 = where.row(S::TILE_M), n0 = gpu::block_x() * S::TILE_N, z = where.batch();
  const bool split = k_per_split > 0;
  const int begin = split ? z * k_per_split : 0, end = split && begin + k_per_split < k ? begin + k_per_split : k;
  if (split && z > 0) e.rank = 0;

  Tile<SourceA, S::TILE_M, S::THREADS, L != TN> a(source_a, split ? 0 : z * stride_a, m0, e.m, k, thread);
  Tile<SourceB, S::TILE_N, S::THREADS, L == NT> b(source_b, split ? 0 : z * stride_b, n0, e.n, k, thread);
  where.move(a, m0, k, thread);
  const int row_a = wave / (S::TILE_N / WAVE_N) * S::WAVE_M, row_b = wave % (S::TILE_N / WAVE_N) * WAVE_N;
  using P = Product<U, S>;
  P p;
#pragma unroll
  for (int i = 0; i < P::TM; ++i)
#pragma unroll
    for (int j = 0; j < P::TN; ++j) p.acc[i][j] = typename U::Acc(0.0f);
  if (begin < end) p.run(a, b, lds, row_a, row_b, begin, end);
  epilogue<U, P::TM, P::TN>(e, p.acc, (float*)lds + wave * STAGE_FLOATS, m0 + row_a, n0 + row_b, lane,
                              where.first_result(e));
}

}  // namespace gemm

