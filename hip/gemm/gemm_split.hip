// architectures: gfx942 gfx950
// GEMMs of mixed operands on CDNA3's 16-bit tensor cores, each operand a sum of 16-bit pieces (gemm_pieces.hpp).
//
//     C[m, n] = alpha * sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n] (+ C[m, n])
//     A B = sum over pieces p of A and q of B, p + q < max(PIECES_A, PIECES_B), of A_p B_q
//
// Float32 tensor cores are 8 times slower than 16-bit ones (gfx90a: 4, too little to gain); these kernels need 2
// or 3 16-bit matmuls:
//   gemm_split_f32_bf16_*  a float32 (3 pieces), b bfloat16: head and its gradient; all 24 bits count
//   gemm_split_f16_bf16_*  a float16 (2 pieces of bfloat16), b bfloat16: the same of float16 activations; exact
//   gemm_split_FORMAT_f16_*  a float16, b a frozen weight (weight_formats.hpp) in 2 pieces of float16 (22 bits):
//                          float32 results
//   gemm_split_FORMAT_f32_*  a float32 and b a frozen weight in 2 pieces of bfloat16 each (16 bits), 3 matmuls:
//                          float16 results, the gradient through a layer that feeds the float32 stream
// Layouts nn, nt; shapes, epilogue, launch and splits of K are those of gemm.hip. Rows are multiples of 8 elements.
//
// The tile is 128 x 128 by 32 of K, 4 waves of 64 x 64. The next tile is prefetched into registers while one LDS buffer
// (24 or 32 KiB) is used, two barriers per tile; two groups share a compute unit, and one multiplies while the other
// stores.
// Sources: Henry, Tang and Heinecke 2019; Markidis et al. 2018.
#include "gemm_pieces.hpp"

namespace gemm {

enum Layout { NN, NT };
constexpr int SIDE = 128, THREADS = 256, TILES = 4;
constexpr int slots(int pieces_a, int pieces_b) { return (pieces_a + pieces_b) * SIDE * CHUNKS; }

template <class S, bool ALONG> struct SplitTile : AlongK<S, SIDE, THREADS> {
  using AlongK<S, SIDE, THREADS>::AlongK;
};
template <class S> struct SplitTile<S, false> : AcrossK<S, SIDE, THREADS> {
  using AcrossK<S, SIDE, THREADS>::AcrossK;
};

template <class T, int PA, int PB>
GPU_FN void multiply(typename Unit<T>::Acc (&acc)[TILES][TILES], const gpu::u32x4* lds, int row_a, int row_b,
                     int lane) {
  using U = Unit<T>;
  constexpr int MOST = PA > PB ? PA : PB;
  typename U::Fragment b[PB][TILES];
#pragma unroll
  for (int q = 0; q < PB; ++q)
#pragma unroll
    for (int j = 0; j < TILES; ++j) b[q][j] = U::load(lds + (PA + q) * SIDE * CHUNKS, row_b + 16 * j, 0, lane);
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int p = 0; p < PA; ++p) {
      const typename U::Fragment a = U::load(lds + p * SIDE * CHUNKS, row_a + 16 * i, 0, lane);
#pragma unroll
      for (int q = 0; q < PB && p + q < MOST; ++q)
#pragma unroll
        for (int s = 0; s < U::STEPS; ++s)
#pragma unroll
          for (int j = 0; j < TILES; ++j) acc[i][j] = U::mma(s, a, b[q][j], acc[i][j]);
    }
}

template <class T, int PA, int PB, Layout L, class SourceA, class SourceB>
GPU_FN void split_product(const SourceA& source_a, const SourceB& source_b, Epilogue e, int k, int k_per_split,
                          long stride_a, long stride_b, gpu::u32x4* lds) {
  using U = Unit<T>;
  const int thread = gpu::thread(), lane = gpu::lane(), wave = gpu::wave();
  const int m0 = gpu::block_y() * SIDE, n0 = gpu::block_x() * SIDE, z = gpu::block_z();
  const bool split = k_per_split > 0;
  const int begin = split ? z * k_per_split : 0, end = split && begin + k_per_split < k ? begin + k_per_split : k;
  if (split && z > 0) e.rank = 0;

  SplitTile<SourceA, true> a(source_a, split ? 0 : z * stride_a, m0, e.m, k, thread);
  SplitTile<SourceB, L == NT> b(source_b, split ? 0 : z * stride_b, n0, e.n, k, thread);
  const int row_a = wave / 2 * 64, row_b = wave % 2 * 64;
  typename U::Acc acc[TILES][TILES] = {};
  const auto after = [&](int k0) { return k0 + DEPTH < end ? k0 + DEPTH : k0; };
  if (begin < end) {
    fetch_all(a, begin, thread);
    look_all(b, begin, thread);
    fetch_all(b, begin, thread);
    look_all(b, after(begin), thread);
  }
#pragma unroll 1
  for (int k0 = begin; k0 < end; k0 += DEPTH) {
    gpu::lds_barrier();  // the tile before has been read; loads from memory go on
#pragma unroll
    for (int i = 0; i < decltype(a)::LOADS; ++i) a.template store_pieces<PA>(lds, k0, thread, i);
#pragma unroll
    for (int i = 0; i < decltype(b)::LOADS; ++i)
      b.template store_pieces<PB>(lds + PA * SIDE * CHUNKS, k0, thread, i);
    const int next = after(k0);  // the last tile once more, not used
    fetch_all(a, next, thread);
    fetch_all(b, next, thread);
    look_all(b, after(next), thread);
    gpu::lds_barrier();
    multiply<T, PA, PB>(acc, lds, row_a, row_b, lane);
  }
  float* const stage = (float*)lds + wave * STAGE_FLOATS;
  epilogue<U, TILES, TILES>(e, acc, stage, m0 + row_a, n0 + row_b, lane, (long)z * e.m * e.n);
}

}  // namespace gemm

#define DENSE(name, A, POINTER, PA, LAYOUT)                                                                            \
  extern "C" GPU_KERNEL(256) GPU_WAVES_PER_SIMD(2) void name(POINTER a, const unsigned short* b, EPILOGUE_ARGUMENTS, \
                                                             long stride_a, long stride_b) {                          \
    GPU_SHARED(gpu::u32x4, lds, gemm::slots(PA, 1));                                                                  \
    gemm::split_product<gemm::BF16, PA, 1, gemm::LAYOUT>(gemm::A{a}, gemm::OnePiece{b}, EPILOGUE, k, k_per_split, \
                                                         stride_a, stride_b, lds);                                    \
  }
DENSE(gemm_split_f32_bf16_nn, FloatPieces, const float*, 3, NN)
DENSE(gemm_split_f32_bf16_nt, FloatPieces, const float*, 3, NT)
DENSE(gemm_split_f16_bf16_nn, HalfPieces, const unsigned short*, 2, NN)
DENSE(gemm_split_f16_bf16_nt, HalfPieces, const unsigned short*, 2, NT)

#define WEIGHT(name, T, A, POINTER, PA, LAYOUT, TAG)                                                                  \
  extern "C" GPU_KERNEL(256) GPU_WAVES_PER_SIMD(2) void name(POINTER a, TAG##_PARAMETERS, EPILOGUE_ARGUMENTS) {       \
    GPU_SHARED(gpu::u32x4, lds, gemm::slots(PA, 2));                                                                  \
    using Weight = gemm::WeightPieces<gemm::T, decltype(TAG##_WEIGHT)>;                                               \
    const Weight w{TAG##_WEIGHT};                                                                                     \
    alpha /= Weight::SCALE;                                                                                           \
    gemm::split_product<gemm::T, PA, 2, gemm::LAYOUT>(gemm::A{a}, w, EPILOGUE, k, k_per_split, 0, 0, lds);            \
  }
#define HALF(LAYOUT, layout, format, TAG)                                                                             \
  WEIGHT(gemm_split_##format##_f16_##layout, F16, OnePiece, const unsigned short*, 1, LAYOUT, TAG)
#define FLOAT(LAYOUT, layout, format, TAG)                                                                            \
  WEIGHT(gemm_split_##format##_f32_##layout, BF16, FloatPieces, const float*, 2, LAYOUT, TAG)
#define HALF_NN(format, TAG) HALF(NN, nn, format, TAG)
#define HALF_NT(format, TAG) HALF(NT, nt, format, TAG)
#define FLOAT_NN(format, TAG) FLOAT(NN, nn, format, TAG)
#define FLOAT_NT(format, TAG) FLOAT(NT, nt, format, TAG)
WEIGHT_FORMATS(HALF_NN)
WEIGHT_FORMATS(FLOAT_NN)
WEIGHT_FORMATS(HALF_NT)
WEIGHT_FORMATS(FLOAT_NT)
