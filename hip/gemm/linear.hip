// architectures: gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153 gfx1200 gfx1201
// GEMM of 16-bit activations with a frozen weight of some format (weight_formats.hpp), decoded on the way
// into LDS; on the tensor cores.
//
//     C[m, n] = sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n]
//
// b: an [out, in] weight: nt is the forward x W^T, nn the backward dy W. a: [M, K] float16 or bfloat16; the rest, the
// launch and the splits of K are those of gemm.hip. Rows are multiples of 8 elements.
// Sources: as gemm.hip.
#include "gemm_product.hpp"

#define WEIGHT(name, T, SHAPE, LAYOUT, TAG)                                                                           \
  extern "C" GPU_KERNEL(gemm::SHAPE::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                        \
      const unsigned short* a, TAG##_PARAMETERS, EPILOGUE_ARGUMENTS) {                                                \
    GPU_SHARED(gpu::u32x4, lds, gemm::SHAPE::LDS);                                                                    \
    const gemm::Weight<gemm::T, decltype(TAG##_WEIGHT)> w{TAG##_WEIGHT};                                              \
    gemm::product<gemm::T, gemm::SHAPE, gemm::LAYOUT>(gemm::Dense<true>{a}, w, EPILOGUE, k, k_per_split, 0, 0, lds);  \
  }
#define WEIGHT_SHAPES(name, T, LAYOUT, TAG)                                                                           \
  WEIGHT(name##_big, T, Big, LAYOUT, TAG)                                                                             \
  WEIGHT(name##_small, T, Small, LAYOUT, TAG)
#define F16_NN(format, TAG) WEIGHT_SHAPES(gemm_##format##_f16_nn, F16, NN, TAG)
#define F16_NT(format, TAG) WEIGHT_SHAPES(gemm_##format##_f16_nt, F16, NT, TAG)
#define BF16_NN(format, TAG) WEIGHT_SHAPES(gemm_##format##_bf16_nn, BF16, NN, TAG)
#define BF16_NT(format, TAG) WEIGHT_SHAPES(gemm_##format##_bf16_nt, BF16, NT, TAG)
WEIGHT_FORMATS(F16_NN)
WEIGHT_FORMATS(BF16_NN)
WEIGHT_FORMATS(F16_NT)
WEIGHT_FORMATS(BF16_NT)
