// GEMMs with one short side (at most 64), as LoRA's matrices A and B (float32, rank r) need. Float32 arithmetic.
//
//     C[m, n] = alpha * sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n] (+ C[m, n])
//
// gemm_skinny_nt_*: x A^T (u of the forward); _nn_*: dy B (its gradient); _tn_*: du^T x and dy^T u (dA, dB; K =
// tokens). a, b each of any dtype, given at run time; rows are multiples of 8 elements, addresses of 16 bytes. c, bias,
// residual, u, v and the splits of K are those of gemm.hip (gemm_epilogue.hpp); no batches.
//
// The tile is 128 x 16 or 128 x 64 by 32 of K, 256 threads; with SWAPPED the kernel is given b and a in this order and
// makes the transposed result, so that its 128 rows always lie along the long side.
// Launch: (ceil(N / tile), ceil(M / tile), splits) groups. Bound by reading the long operand once: 128-bit loads of the
// next tile are in flight in registers while one LDS buffer is used (two barriers per tile), so that several groups
// share a compute unit. CDNA: v_mfma_f32_16x16x4_f32, 4 waves of 32 rows. RDNA: 2 x 4 or 8 x 4 results per work-item.
// LDS holds [k][row], permuted (at()) so that neither stores nor reads conflict in a bank.
// Sources: Hu et al. 2021 (LoRA); Volkov and Demmel 2008 (register blocking).
#include "gemm_epilogue.hpp"

namespace gemm {

enum Layout { NN, NT, TN };
constexpr int LONG = 128, DEPTH_SKINNY = 32, GROUP = 256;

// Where element (k, row) lies; 4 successive rows from a multiple of 4 on stay together. Bits 3 and 4 of the place turn
// with k / 8, for the lanes that store k, k + 8, k + 16 and k + 24 of 8 rows; bit 4 with k % 2, for those that read 16
// rows of k and of k + 1; bit 2 for those that store 4 rows at steps of 8.
template <int ROWS> GPU_FN int at(int k, int row) {
  const int turn = (k >> 3 & 3) << 3;
  if (ROWS >= 32) return k * ROWS + (row ^ turn ^ (k & 1) << 4 ^ (row >> 5 & 1) << 2);
  return (k * ROWS + row) ^ turn ^ (k >> 1 & 1) << 2;
}

// ROWS x 32 of an operand: 8 elements along K ([rows, K] in memory) or along the rows ([K, rows]) a chunk.
template <int ROWS, bool ALONG_K> struct SkinnyTile {
  static constexpr int CHUNKS_ALL = ROWS * DEPTH_SKINNY / 8, LOADS = CHUNKS_ALL > GROUP ? CHUNKS_ALL / GROUP : 1;
  const void* data;
  int kind, k_total, row0, rows;  // rows: of the matrix from row0 on
  gpu::u32x4 lo[LOADS], hi[LOADS];

  GPU_FN static bool mine(int thread) { return CHUNKS_ALL >= GROUP || thread < CHUNKS_ALL; }
  GPU_FN static int row(int chunk) { return ALONG_K ? chunk / 4 : chunk % (ROWS / 8) * 8; }
  GPU_FN static int depth(int chunk) { return ALONG_K ? chunk % 4 * 8 : chunk / (ROWS / 8); }

  GPU_FN void fetch(int k0, int thread) {
    if (!mine(thread)) return;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = thread + i * GROUP, r = row(chunk), k = depth(chunk);
      const int inside = k0 + k < k_total ? k0 + k : k0;
      const int last = ALONG_K ? rows - 1 : 0, place = row0 + (r < rows ? r : last);
      const long from = ALONG_K ? (long)place * k_total + inside : (long)inside * (row0 + rows) + place;
      if (kind == 0) {
        lo[i] = gpu::load16((const float*)data + from);
        hi[i] = gpu::load16((const float*)data + from + 4);
      } else {
        lo[i] = gpu::load16((const unsigned short*)data + from);
      }
    }
  }
  GPU_FN void store(float* lds, int k0, int thread) {
    if (!mine(thread)) return;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int chunk = thread + i * GROUP, r = row(chunk), k = depth(chunk);
      const bool inside = k0 + k < k_total;
      float x[8];
      if (kind == 0) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = gpu::bits_to_float(e < 4 ? lo[i][e] : hi[i][e - 4]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = widen((unsigned short)(lo[i][e / 2] >> (16 * (e & 1))), kind);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = inside ? x[e] : 0.0f;
      if (ALONG_K) {
#pragma unroll
        for (int e = 0; e < 8; ++e) lds[at<ROWS>(k + e, r)] = x[e];
      } else {
#pragma unroll
        for (int e = 0; e < 8; e += 4)
          *(gpu::f32x4*)(lds + at<ROWS>(k, r + e)) = gpu::f32x4{x[e], x[e + 1], x[e + 2], x[e + 3]};
      }
    }
  }
};

// The results of a work-item. each(f) calls f(row, column, value) for all of them.
#if GPU_CDNA
template <int WIDTH> struct SkinnyCore {
  static constexpr int TM = 2, TN = WIDTH / 16;
  gpu::f32x4 acc[TM][TN] = {};
  int row0, lane;
  GPU_FN explicit SkinnyCore(int thread) : row0(thread / 64 * 32), lane(thread % 64) {}
  GPU_FN void multiply(const float* a, const float* b) {
#pragma unroll
    for (int step = 0; step < DEPTH_SKINNY / 4; ++step) {
      const int k = 4 * step + lane / 16;
      float x[TM], y[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) x[i] = a[at<LONG>(k, row0 + 16 * i + lane % 16)];
#pragma unroll
      for (int j = 0; j < TN; ++j) y[j] = b[at<WIDTH>(k, 16 * j + lane % 16)];
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = gpu::mfma_f32_16x16x4_f32(y[j], x[i], acc[i][j]);
    }
  }
  template <class F> GPU_FN void each(F f) const {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(row0 + 16 * i + lane % 16, 16 * j + 4 * (lane / 16) + e, acc[i][j][e]);
  }
};
#else
template <int WIDTH> struct SkinnyCore {
  static constexpr int ROWS = LONG * WIDTH / 4 / GROUP;
  gpu::f32x4 acc[ROWS] = {};
  int row0, column0;
  GPU_FN explicit SkinnyCore(int thread) : row0(thread / (WIDTH / 4) * ROWS), column0(thread % (WIDTH / 4) * 4) {}
  // In the order in which at() has them: 8 rows are read as they lie.
  GPU_FN int row(int i) const { return row0 + (ROWS == 8 ? i ^ (row0 >> 3 & 4) : i); }
  GPU_FN void multiply(const float* a, const float* b) {
#pragma unroll 8
    for (int k = 0; k < DEPTH_SKINNY; ++k) {
      const gpu::f32x4 y = *(const gpu::f32x4*)(b + at<WIDTH>(k, column0));
      const gpu::Pack<ROWS, float> x = *(const gpu::Pack<ROWS, float>*)(a + at<LONG>(k, row(0)));
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = gpu::fma(x.at[i], y[j], acc[i][j]);
    }
  }
  template <class F> GPU_FN void each(F f) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(row(i), column0 + j, acc[i][j]);
  }
};
#endif

template <Layout L, int WIDTH>
GPU_FN void skinny(const void* a, const void* b, int a_kind, int b_kind, Epilogue e, int k, int k_per_split,
                   float* lds) {
  const int thread = gpu::thread(), z = gpu::block_z();
  const bool swapped = e.flags & SWAPPED, split = k_per_split > 0;
  const int row0 = (swapped ? gpu::block_x() : gpu::block_y()) * LONG;
  const int column0 = (swapped ? gpu::block_y() : gpu::block_x()) * WIDTH;
  const int rows = swapped ? e.n : e.m, columns = swapped ? e.m : e.n;
  const int begin = split ? z * k_per_split : 0, end = split && begin + k_per_split < k ? begin + k_per_split : k;
  if (split && z > 0) e.rank = 0;

  SkinnyTile<LONG, L != TN> left{a, a_kind, k, row0, rows - row0, {}, {}};
  SkinnyTile<WIDTH, L == NT> right{b, b_kind, k, column0, columns - column0, {}, {}};
  SkinnyCore<WIDTH> core(thread);
  float* const lds_right = lds + LONG * DEPTH_SKINNY;
  if (begin < end) {
    left.fetch(begin, thread);
    right.fetch(begin, thread);
  }
#pragma unroll 1
  for (int k0 = begin; k0 < end; k0 += DEPTH_SKINNY) {
    gpu::lds_barrier();  // the tile before has been read; loads from memory go on
    left.store(lds, k0, thread);
    right.store(lds_right, k0, thread);
    const int next = k0 + DEPTH_SKINNY < end ? k0 + DEPTH_SKINNY : k0;  // the last tile once more, not used
    left.fetch(next, thread);
    right.fetch(next, thread);
    gpu::lds_barrier();
    core.multiply(lds, lds_right);
  }
  const long offset = (long)z * e.m * e.n;
  core.each([&](int row, int column, float x) {
    const int m = swapped ? column0 + column : row0 + row, n = swapped ? row0 + row : column0 + column;
    x *= e.alpha;
#pragma unroll 1
    for (int r = 0; r < e.rank; ++r) x += u_at(e, m, r) * v_at(e, n, r);
    finish_one(e, x, m, n, offset);
  });
}

}  // namespace gemm

#define SKINNY(name, LAYOUT, WIDTH)                                                                                    \
  extern "C" GPU_KERNEL(256) void name(const void* a, const void* b, int a_kind, int b_kind, EPILOGUE_ARGUMENTS) {     \
    GPU_SHARED(float, lds, (gemm::LONG + WIDTH) * gemm::DEPTH_SKINNY);                                                \
    gemm::skinny<gemm::LAYOUT, WIDTH>(a, b, a_kind, b_kind, EPILOGUE, k, k_per_split, lds);                            \
  }
SKINNY(gemm_skinny_nn_16, NN, 16)
SKINNY(gemm_skinny_nn_64, NN, 64)
SKINNY(gemm_skinny_nt_16, NT, 16)
SKINNY(gemm_skinny_nt_64, NT, 64)
SKINNY(gemm_skinny_tn_16, TN, 16)
SKINNY(gemm_skinny_tn_64, TN, 64)
