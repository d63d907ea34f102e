// The GEMM in float32, for gemm_f32.hip and gemm_grouped_f32.hip: tiles of 128 x 128, of 4 waves.
//
// CDNA: v_mfma_f32_16x16x4_f32, waves of 64 x 64. RDNA: the same of 32 lanes, 16 x 8 results per lane in eight blocks:
//
//     wave:  4 x 8 lanes; lane (y, x) owns rows 16 i + 4 y .. + 3 (i < 4), columns 32 j + 4 x .. + 3 (j < 2)
//     a step of K: 6 LDS reads of 128 bits (rows are broadcasts), one step ahead, for 128 FMAs in an order that
//     the compiler can pair (v_dual_fmac_f32)
//
// A read of 128 bits takes the LDS, which two SIMDs share, 4 clocks; 8 x 8 results would take 4 reads for 32 clocks of
// paired FMAs, all that the LDS can give.
//
// Tiles are double-buffered in LDS, the next one is prefetched into registers: one barrier per tile of 16 along K. The
// first tile takes what whole tiles leave of K, so the loop masks nothing; the last one is multiplied behind it. In the
// loop of RDNA no vector instruction computes an address in global memory, and addresses in LDS are made once a tile.
// Sources: Goto and van de Geijn 2008; Volkov and Demmel 2008 (register blocking); the RDNA3 ISA manual, 7.6
// (dual issue).
#pragma once
#include "gemm_f32.hpp"
#include "gemm_place.hpp"

namespace gemm {

enum Layout { NN, NT, TN, TT };
constexpr int TILE = 128, STRIDE = TILE, BUFFER = 2 * DEPTH_F32 * STRIDE;  // floats of one of the two buffers
constexpr int THREADS = 4 * (GPU_CDNA ? 64 : 32);

#if GPU_CDNA
struct Core {
  using U = Unit<F16>;  // 16 x 16 results lie the same for all inputs
  gpu::f32x4 acc[4][4] = {};
  int row_a, row_b, lane;

  GPU_FN Core(int wave, int l) : row_a(wave / 2 * 64), row_b(wave % 2 * 64), lane(l) {}
  // The tiles that lie `now` bytes behind lds, 0 or a power of two beyond a buffer.
  GPU_FN void multiply(const float* lds, int now) {
    const float *a = lds + now / 4, *b = a + BUFFER / 2;
#pragma unroll
    for (int step = 0; step < DEPTH_F32 / 4; ++step) {
      const int k = 4 * step + lane / 16, at = lane % 16;
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = a[place(STRIDE, k, row_a + 16 * i + at)];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = b[place(STRIDE, k, row_b + 16 * j + at)];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = gpu::mfma_f32_16x16x4_f32(y[j], x[i], acc[i][j]);
    }
  }
  GPU_FN void finish_all(const Epilogue& e, float* lds, int wave, int m0, int n0, long offset) {
    epilogue<U, 4, 4>(e, acc, lds + wave * STAGE_FLOATS, m0 + row_a, n0 + row_b, lane, offset);
  }
};
#else
struct Core {
  static constexpr int ROWS = 16, BLOCKS = ROWS / 4;
  gpu::f32x4 acc[ROWS][2] = {};
  int row_a, row_b;

  GPU_FN Core(int wave, int lane) : row_a(wave / 2 * 64 + lane / 8 * 4), row_b(wave % 2 * 64 + lane % 8 * 4) {}
  GPU_FN static int row(int i) { return i / 4 * 16 + i % 4; }
  GPU_FN void multiply(const float* lds, int now) {
    // place() has two forms for the rows of a lane, four for its columns, constants apart: what k flips of bits 3 and
    // 4.
    int at_a[2], at_b[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) at_a[i] = gpu::optimization_barrier((4 * row_a + now) ^ 32 * i);
#pragma unroll
    for (int i = 0; i < 4; ++i) at_b[i] = gpu::optimization_barrier((4 * row_b + now) ^ 32 * i);
    gpu::f32x4 x[2][BLOCKS], y[2][2];
    load(lds, 0, at_a, at_b, x[0], y[0]);
#pragma unroll
    for (int k = 0; k < DEPTH_F32; ++k) {
      if (k + 1 < DEPTH_F32) load(lds, k + 1, at_a, at_b, x[(k + 1) % 2], y[(k + 1) % 2]);
      step(x[k % 2], y[k % 2]);
      gpu::sched_fence();  // pairs are found within a step of K
    }
  }
  // place(STRIDE, k, row_a + 16 h) and place(STRIDE, k, row_b + 32 h).
  GPU_FN static void load(const float* lds, int k, const int (&at_a)[2], const int (&at_b)[4],
                          gpu::f32x4 (&x)[BLOCKS], gpu::f32x4 (&y)[2]) {
    const auto read = [](const float* p, int bytes) { return *(const gpu::f32x4*)((const char*)p + bytes); };
    const int flip = k / 4 ^ k % 2 * 2;  // in eights
#pragma unroll
    for (int h = 0; h < BLOCKS; ++h) x[h] = read(lds, at_a[flip % 2] + 4 * (k * STRIDE + 16 * (h ^ flip / 2)));
#pragma unroll
    for (int h = 0; h < 2; ++h) y[h] = read(lds + BUFFER / 2, at_b[flip] + 4 * (k * STRIDE + 32 * h));
  }
  // acc += x y^T. Along the diagonals of 2 x 2 blocks: neighbors then differ in both sources, which come from
  // different register banks, and one result is even and one odd, so that the compiler can issue them as a pair.
  GPU_FN void step(const gpu::f32x4 (&x)[BLOCKS], const gpu::f32x4 (&y)[2]) {
#pragma unroll
    for (int i = 0; i < ROWS; i += 2)
#pragma unroll
      for (int j = 0; j < 8; j += 2)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int row = i + pair % 2, c = j + (pair % 2 ^ pair / 2);
          acc[row][c / 4][c % 4] = gpu::fma(x[row / 4][row % 4], y[c / 4][c % 4], acc[row][c / 4][c % 4]);
        }
  }
  GPU_FN void finish_all(const Epilogue& e, float*, int, int m0, int n0, long offset) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) acc[i][h] *= e.alpha;
#pragma unroll 1
    for (int r = 0; r < e.rank; ++r) {
      float v[2][4];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j / 4][j % 4] = v_at(e, n0 + row_b + j / 4 * 32 + j % 4, r);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const float u = u_at(e, m0 + row_a + row(i), r);
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j / 4][j % 4] += u * v[j / 4][j % 4];
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) finish(e, acc[i][h], m0 + row_a + row(i), n0 + row_b + 32 * h, offset);
  }
};
#endif

template <Layout L, class SourceA, class SourceB, class Where = OfGrid>
GPU_FN void product(const SourceA& source_a, const SourceB& source_b, Epilogue e, int k, int k_per_split, long stride_a,
                    long stride_b, float* lds, const Where& where = {}) {
#if GPU_CDNA
  const int thread = gpu::thread(), wave = gpu::wave(), lane = gpu::lane();
#else
  const int thread = gpu::thread(), wave = thread / 32, lane = thread % 32;  // 32 also where a wave has 64 lanes
#endif
  const int m0 = where.row(TILE), n0 = gpu::block_x() * TILE, z = where.batch();
  const bool split = k_per_split > 0;
  const int begin = split ? z * k_per_split : 0, end = split && begin + k_per_split < k ? begin + k_per_split : k;
  if (split && z > 0) e.rank = 0;

  TileF32<SourceA, TILE, THREADS, L == NN || L == NT> a(source_a, split ? 0 : z * stride_a, m0, e.m, k, thread);
  TileF32<SourceB, TILE, THREADS, L == NT || L == TT> b(source_b, split ? 0 : z * stride_b, n0, e.n, k, thread);
  where.move(a, m0, k, thread);
  Core core(wave, lane);
  const int part = (end - begin - 1) % DEPTH_F32 + 1;  // of K, in the first tile
  if (begin < end) {
    a.template fetch<false>(begin, part, thread);
    b.template fetch<false>(begin, part, thread);
    a.template store<false>(lds, 0, part, thread);
    b.template store<false>(lds + BUFFER / 2, 0, part, thread);
  }
  gpu::local_barrier();
  int now = 0;
#pragma unroll 1
  for (int next = begin + part; next < end; next += DEPTH_F32) {
    a.template fetch<true>(next, DEPTH_F32, thread);
    b.template fetch<true>(next, DEPTH_F32, thread);
    gpu::sched_fence();
    core.multiply(lds, now);
    gpu::sched_fence();
    now ^= 4 * BUFFER;
    a.template store<true>(lds, now, DEPTH_F32, thread);
    b.template store<true>(lds + BUFFER / 2, now, DEPTH_F32, thread);
    gpu::local_barrier();  // the only one of a tile
  }
  if (begin < end) core.multiply(lds, now);
  core.finish_all(e, lds, wave, m0, n0, where.first_result(e));
}

}  // namespace gemm
