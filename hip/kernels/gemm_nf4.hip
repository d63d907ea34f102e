// architectures: gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1200 gfx1201
// Matrix product of 16-bit activations with a frozen NF4 weight, decoded on the way into LDS; on the matrix unit.
//
//     C[m, n] = sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n]
//
// b: an [out, in] NF4 weight, plain or double-quantised (NESTED): nt is the forward x W^T, nn the backward dy W.
// a: [M, K] float16 or bfloat16; the rest, the launch and the splits of K are those of gemm.hip. Rows are multiples of
// 8 elements.
// Sources: Dettmers et al. 2023 (NF4); otherwise as gemm.hip.
#include "gemm_product.hpp"

#define WEIGHT(name, T, SHAPE, LAYOUT, NESTED)                                                                         \
  extern "C" GPU_KERNEL(gemm::SHAPE::THREADS) OCCUPANCY void name(                                                    \
      const unsigned short* a, const unsigned char* packed, const void* absmax, const float* nested_absmax,           \
      const float* nested_code, const float* nested_offset, int block_shift, int nested_shift, EPILOGUE_ARGUMENTS) {   \
    GPU_SHARED(gpu::u32x4, lds, gemm::SHAPE::LDS);                                                              \
    const gemm::NF4<gemm::T, NESTED> w{packed, absmax, nested_absmax, nested_code, NESTED ? *nested_offset : 0.0f,     \
                                       gemm::nf4_value(gpu::lane()), block_shift, nested_shift};                      \
    gemm::product<gemm::T, gemm::SHAPE, gemm::LAYOUT>(gemm::Dense<true>{a}, w, EPILOGUE, k, k_per_split, 0, 0, lds);   \
  }
#define WEIGHT_TYPES(LAYOUT, layout)                                          \
  WEIGHT(gemm_nf4_f16_##layout##_big, F16, Big, LAYOUT, false)                \
  WEIGHT(gemm_nf4_f16_##layout##_small, F16, Small, LAYOUT, false)            \
  WEIGHT(gemm_nf4_nested_f16_##layout##_big, F16, Big, LAYOUT, true)          \
  WEIGHT(gemm_nf4_nested_f16_##layout##_small, F16, Small, LAYOUT, true)      \
  WEIGHT(gemm_nf4_bf16_##layout##_big, BF16, Big, LAYOUT, false)              \
  WEIGHT(gemm_nf4_bf16_##layout##_small, BF16, Small, LAYOUT, false)          \
  WEIGHT(gemm_nf4_nested_bf16_##layout##_big, BF16, Big, LAYOUT, true)        \
  WEIGHT(gemm_nf4_nested_bf16_##layout##_small, BF16, Small, LAYOUT, true)
WEIGHT_TYPES(NN, nn)
WEIGHT_TYPES(NT, nt)
