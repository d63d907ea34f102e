// GEMM in float32: operands of any dtype widened to float32, float32 multiplied and added.
//
//     C[m, n] = alpha * sum_k A[m, k] B[k, n] + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n] (+ C[m, n])
//
// Shapes, layouts (nn, nt, tn, here also tt), epilogue, splits of K and launch are those of gemm.hip; the tile is 128 x
// 128, of 4 waves. Kernels: gemm_f32_*: a, b float32; gemm_mix_*: each of a dtype given at run time; gemm_FORMAT_f32_*:
// b a frozen weight (weight_formats.hpp), a of any dtype; gemm_any_*: every dtype, every alignment, one element per
// load.
//
// Sources: as gemm_f32_product.hpp.
#include "gemm_f32_product.hpp"

#define DENSE(name, LAYOUT)                                                                                           \
  extern "C" GPU_KERNEL(gemm::THREADS) GPU_WAVES_PER_SIMD(2) void name(const void* a, const void* b, EPILOGUE_ARGUMENTS, \
                                                             long stride_a, long stride_b) {                          \
    GPU_SHARED(float, lds, 2 * gemm::BUFFER);                                                                         \
    using Source = gemm::DenseF32<false>;                                                                             \
    gemm::product<gemm::LAYOUT>(Source{a, 0}, Source{b, 0}, EPILOGUE, k, k_per_split, stride_a, stride_b, lds); \
  }
DENSE(gemm_f32_nn, NN)
DENSE(gemm_f32_nt, NT)
DENSE(gemm_f32_tn, TN)

#define KINDS(name, SOURCE, LAYOUT)                                                                                    \
  extern "C" GPU_KERNEL(gemm::THREADS) GPU_WAVES_PER_SIMD(2) void name(const void* a, const void* b, int a_kind, int b_kind, \
                                                             EPILOGUE_ARGUMENTS, long stride_a, long stride_b) {      \
    GPU_SHARED(float, lds, 2 * gemm::BUFFER);                                                                         \
    using Source = gemm::SOURCE;                                                                                      \
    gemm::product<gemm::LAYOUT>(Source{a, a_kind}, Source{b, b_kind}, EPILOGUE, k, k_per_split, stride_a, stride_b, \
                                lds);                                                                                 \
  }
KINDS(gemm_mix_nn, DenseF32<true>, NN)
KINDS(gemm_mix_nt, DenseF32<true>, NT)
KINDS(gemm_mix_tn, DenseF32<true>, TN)
KINDS(gemm_any_nn, AnyF32, NN)
KINDS(gemm_any_nt, AnyF32, NT)
KINDS(gemm_any_tn, AnyF32, TN)
KINDS(gemm_any_tt, AnyF32, TT)

#define WEIGHT(name, LAYOUT, TAG)                                                                                     \
  extern "C" GPU_KERNEL(gemm::THREADS) GPU_WAVES_PER_SIMD(2) void name(const void* a, TAG##_PARAMETERS, int a_kind,             \
                                                             EPILOGUE_ARGUMENTS) {                                    \
    GPU_SHARED(float, lds, 2 * gemm::BUFFER);                                                                         \
    const gemm::WeightF32<decltype(TAG##_WEIGHT)> w{TAG##_WEIGHT};                                                    \
    gemm::product<gemm::LAYOUT>(gemm::DenseF32<true>{a, a_kind}, w, EPILOGUE, k, k_per_split, 0, 0, lds);             \
  }
#define WEIGHT_LAYOUTS(format, TAG)                                                                                   \
  WEIGHT(gemm_##format##_f32_nn, NN, TAG)                                                                             \
  WEIGHT(gemm_##format##_f32_nt, NT, TAG)
WEIGHT_FORMATS(WEIGHT_LAYOUTS)

// out = alpha-scaled parts summed in order + bias + residual (+ out). parts: float32 [splits, m, n].
// Launch: ceil(m * ceil(n / 4) / 256) groups of 256, 4 results of a row a work-item.
extern "C" GPU_KERNEL(256) void gemm_reduce(const float* parts, void* c, const float* bias, const void* residual, int m,
                                            int n, int splits, int c_kind, int residual_kind, int flags) {
  const gemm::Epilogue e{c, bias, residual, nullptr, nullptr, m, n, 0, c_kind, residual_kind, 0, 0, flags, 1.0f};
  const int per_row = (n + 3) / 4;
  const long item = (long)gpu::block_x() * 256 + gpu::thread();
  const int row = (int)(item / per_row), column = (int)(item % per_row) * 4;
  if (row >= m) return;
  const long at = (long)row * n + column;
  gpu::f32x4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int s = 0; s < splits; ++s) {
    const float* p = parts + (long)s * m * n + at;
    if (n % 4 == 0) {
      sum += *(const gpu::f32x4*)p;
    } else {
      for (int i = 0; i < 4; ++i) sum[i] += column + i < n ? p[i] : 0.0f;
    }
  }
  gemm::finish(e, sum, row, column, 0);
}
