// architectures: gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153 gfx1200 gfx1201
// GEMM with 16-bit operands on the tensor cores, float32 accumulation.
//
//     C[m, n] = alpha * sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n] (+ C[m, n])
//
// a: [M, K] (layouts nn, nt) or [K, M] (tn); b: [K, N] (nn, tn) or [N, K] (nt); float16 or bfloat16, row-major.
// c: [M, N] float32, float16 or bfloat16; bias float32 [N]; residual, u, v of any dtype (gemm_epilogue.hpp). M, N, K,
// rank are run-time arguments; *_unaligned take rows and addresses of any alignment, the others rows of multiples of
// 8 elements.
//
// Launch: (ceil(N / TILE_N), ceil(M / TILE_M), batch) groups, or with k_per_split > 0 (a multiple of 64) as many in z
// as there are splits: each writes its own float32 [M, N] behind `c`, and gemm_reduce adds them and does the epilogue.
// Sources: Goto and van de Geijn 2008 (blocking); AMD's instruction set manuals (fragments).
#include "gemm_product.hpp"

#define DENSE(name, T, SHAPE, LAYOUT, ALIGNED)                                                                        \
  extern "C" GPU_KERNEL(gemm::SHAPE::THREADS) GPU_WAVES_PER_SIMD(2) void name(const unsigned short* a, const unsigned short* b,    \
                                                                  EPILOGUE_ARGUMENTS, long stride_a, long stride_b) { \
    GPU_SHARED(gpu::u32x4, lds, gemm::SHAPE::LDS);                                                              \
    using Source = gemm::Dense<ALIGNED>;                                                                              \
    gemm::product<gemm::T, gemm::SHAPE, gemm::LAYOUT>(Source{a}, Source{b}, EPILOGUE, k, k_per_split, stride_a,       \
                                                      stride_b, lds);                                                 \
  }
#define DENSE_TYPES(LAYOUT, layout)                              \
  DENSE(gemm_f16_##layout##_big, F16, Big, LAYOUT, true)         \
  DENSE(gemm_f16_##layout##_small, F16, Small, LAYOUT, true)     \
  DENSE(gemm_f16_##layout##_unaligned, F16, Small, LAYOUT, false) \
  DENSE(gemm_bf16_##layout##_big, BF16, Big, LAYOUT, true)       \
  DENSE(gemm_bf16_##layout##_small, BF16, Small, LAYOUT, true)   \
  DENSE(gemm_bf16_##layout##_unaligned, BF16, Small, LAYOUT, false)
DENSE_TYPES(NN, nn)
DENSE_TYPES(NT, nt)
DENSE_TYPES(TN, tn)

