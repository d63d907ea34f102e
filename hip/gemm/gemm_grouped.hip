// architectures: gfx90a gfx942 gfx950 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153 gfx1200 gfx1201
// GEMMs of experts (gemm_grouped.hpp) with 16-bit activations on the tensor cores, float32 accumulation.
//
//     C[s, n] = alpha * sum_k A[s, k] B[e, k, n] + residual[s, n], where start[e] <= s < start[e + 1]
//
// a: [S, K] float16 or bfloat16, or with an order [T, K]; b: [E, N, K] (nt: the forward) or [E, K, N] (nn: the gradient
// of the rows), of a's type, or a frozen weight [E N, K] or [E K, N] of some format (weight_formats.hpp). Rows are
// multiples of 8 elements. Tiles are the small ones of gemm.hip.
//
// Launch: (ceil(N / TILE_N), S / TILE_M + E) groups, of which those without a tile end at once.
// Sources: as gemm.hip; Gale et al., MegaBlocks (2022).
#include "gemm_grouped.hpp"
#include "gemm_product.hpp"

namespace gemm {
template <class T, Layout L, class B>
GPU_FN void grouped(const unsigned short* a, const B& b, const Epilogue& e, int k, const OfExpert& where,
                    gpu::u32x4* lds) {
  product<T, Small, L>(Dense<true>{a}, b, e, k, 0, 0, (long)e.n * k, lds, where);
}
}  // namespace gemm

#define DENSE(name, T, LAYOUT)                                                                                        \
  extern "C" GPU_KERNEL(gemm::Small::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                        \
      const unsigned short* a, const unsigned short* b, GROUPED_ARGUMENTS) {                                          \
    GPU_SHARED(gpu::u32x4, lds, gemm::Small::LDS);                                                                    \
    GROUPED_TILE(gemm::Small::TILE_M);                                                                                \
    gemm::grouped<gemm::T, gemm::LAYOUT>(a, gemm::Dense<true>{b}, e, k, where, lds);                                  \
  }
DENSE(grouped_f16_nn, F16, NN)
DENSE(grouped_f16_nt, F16, NT)
DENSE(grouped_bf16_nn, BF16, NN)
DENSE(grouped_bf16_nt, BF16, NT)

#define WEIGHT(name, T, LAYOUT, TAG)                                                                                  \
  extern "C" GPU_KERNEL(gemm::Small::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                        \
      const unsigned short* a, TAG##_PARAMETERS, GROUPED_ARGUMENTS) {                                                 \
    GPU_SHARED(gpu::u32x4, lds, gemm::Small::LDS);                                                                    \
    GROUPED_TILE(gemm::Small::TILE_M);                                                                                \
    const gemm::Weight<gemm::T, decltype(TAG##_WEIGHT)> w{TAG##_WEIGHT};                                              \
    gemm::grouped<gemm::T, gemm::LAYOUT>(a, w, e, k, where, lds);                                                     \
  }
#define WEIGHTS(format, TAG)                          \
  WEIGHT(grouped_##format##_f16_nn, F16, NN, TAG)     \
  WEIGHT(grouped_##format##_f16_nt, F16, NT, TAG)     \
  WEIGHT(grouped_##format##_bf16_nn, BF16, NN, TAG)   \
  WEIGHT(grouped_##format##_bf16_nt, BF16, NT, TAG)
WEIGHT_FORMATS(WEIGHTS)
EXPERT_FORMATS(WEIGHTS)
