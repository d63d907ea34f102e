// GEMMs of experts (gemm_grouped.hpp) in float32: operands of any dtype widened to float32, float32 multiplied and
// added.
//
//     nn, nt:  C[s, n] = alpha * sum_k A[s, k] B[e, k, n] + residual[s, n], where start[e] <= s < start[e + 1]
//     grad:    C[e, m, n] = alpha * sum_s A[s, m] B[s, n] (+ C[e, m, n]), over the rows s of expert e
//
// b: [E, N, K] (nt) or [E, K, N] (nn); dtypes are given at run time. mix: rows and addresses are multiples of 4
// elements and 16 bytes; any: every alignment, one element per load. Operands of nn and nt are those of
// gemm_grouped.hip, and so is their launch; tiles are 128 x 128. grad: (ceil(n / 128), ceil(m / 128), E) groups.
// Sources: as gemm_f32_product.hpp.
#include "gemm_grouped.hpp"
#include "gemm_f32_product.hpp"

#define GROUPED(name, SOURCE, LAYOUT)                                                                                 \
  extern "C" GPU_KERNEL(gemm::THREADS) GPU_WAVES_PER_SIMD(2) void name(const void* a, const void* b, int a_kind,      \
                                                                       int b_kind, GROUPED_ARGUMENTS) {               \
    GPU_SHARED(float, lds, 2 * gemm::BUFFER);                                                                         \
    GROUPED_TILE(gemm::TILE);                                                                                         \
    using Source = gemm::SOURCE;                                                                                      \
    gemm::product<gemm::LAYOUT>(Source{a, a_kind}, Source{b, b_kind}, e, k, 0, 0, (long)n * k, lds, where);           \
  }
GROUPED(grouped_mix_nn, DenseF32<true>, NN)
GROUPED(grouped_mix_nt, DenseF32<true>, NT)
GROUPED(grouped_any_nn, AnyF32, NN)
GROUPED(grouped_any_nt, AnyF32, NT)

#define GRAD(name, SOURCE)                                                                                            \
  extern "C" GPU_KERNEL(gemm::THREADS) GPU_WAVES_PER_SIMD(2) void name(                                               \
      const void* a, const void* b, int a_kind, int b_kind, const int* start, float* c, int m, int n, int flags,      \
      float alpha) {                                                                                                  \
    GPU_SHARED(float, lds, 2 * gemm::BUFFER);                                                                         \
    const int first = start[gpu::block_z()], rows = start[gpu::block_z() + 1] - first;                                \
    const gemm::Epilogue e{c, nullptr, nullptr, nullptr, nullptr, m, n, 0, 0, 0, 0, 0, flags, alpha};                 \
    using Source = gemm::SOURCE;                                                                                      \
    gemm::product<gemm::TN>(Source{gemm::from_row(a, a_kind, first, m), a_kind},                                      \
                            Source{gemm::from_row(b, b_kind, first, n), b_kind}, e, rows, 0, 0, 0, lds);              \
  }
GRAD(grouped_grad_mix, DenseF32<true>)
GRAD(grouped_grad_any, AnyF32)
