// One row times a weight (decoding): every dense dtype, and every format of weight_formats.hpp and eights_formats.hpp.
// Bound by reading the weight once.
//
//     C[n] = alpha * sum_k x[k] B[n, k] + sum_r u[r] v[r, n] + bias[n] + residual[n] (+ C[n])
//
// x: [K], b: [N, K] row-major, dtypes given at run time (0 float32, 1 float16, 2 bfloat16), or a frozen weight. Rows
// and addresses of x and b are multiples of 8 elements and 16 bytes, save in gemv_unaligned.
// c, bias, residual, u, v as in gemm_epilogue.hpp; m is 1.
//
// Launch: (ceil(N / 4), 1, 1) groups of 256. A group makes 4 results: its work-items divide K into chunks of 8, and
// each reads its chunk of x once for the 4 rows; sums by shuffles within a wave, then through LDS, in a fixed order.
#include "eights_formats.hpp"
#include "gemm_epilogue.hpp"

namespace gemm {

constexpr int ROWS = 4, GROUP = 256;

// 8 elements of a dtype named at run time, at a multiple of 16 bytes.
struct AlignedRow {
  const void* data;
  int kind;
  GPU_FN gpu::Eight fetch(long i, int) const {
    gpu::Eight x;
    if (kind == 0) {
      const gpu::f32x4 lo = gpu::load16<gpu::f32x4>((const float*)data + i);
      const gpu::f32x4 hi = gpu::load16<gpu::f32x4>((const float*)data + i + 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) x.at[e] = lo[e], x.at[e + 4] = hi[e];
    } else {
      const gpu::u32x4 raw = gpu::load16((const unsigned short*)data + i);
#pragma unroll
      for (int e = 0; e < 8; ++e) x.at[e] = widen((unsigned short)(raw[e / 2] >> (16 * (e & 1))), kind);
    }
    return x;
  }
};
// The same at any address, of which `count` exist; the others are 0.
struct AnyRow {
  const void* data;
  int kind;
  GPU_FN gpu::Eight fetch(long i, int count) const {
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float y = read(data, kind, i + (e < count ? e : 0));
      x.at[e] = e < count ? y : 0.0f;
    }
    return x;
  }
};

template <class X, class B> GPU_FN void gemv(const X& x, const B& b, const Epilogue& e, int k, float* lds) {
  const int thread = gpu::thread(), n0 = gpu::block_x() * ROWS;
  float sum[ROWS] = {};
#pragma unroll 1
  for (int base = 0; base < k; base += 8 * GROUP) {
    const int at = base + 8 * thread, inside = at < k ? at : 0;  // every lane takes part: formats decode by shuffles
    const int count = k - inside < 8 ? k - inside : 8;
    gpu::Eight left = x.fetch(inside, count), right[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) right[r] = b.fetch((long)(n0 + r < e.n ? n0 + r : e.n - 1) * k + inside, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) left.at[i] = at < k ? left.at[i] : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float part = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) part = gpu::fma(left.at[i], at < k ? right[r].at[i] : 0.0f, part);
      sum[r] += part;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] *= e.alpha;
#pragma unroll 1
    for (int i = thread; i < e.rank; i += GROUP) sum[r] += u_at(e, 0, i) * v_at(e, n0 + r, i);
    sum[r] = gpu::wave_sum(sum[r]);
    if (gpu::lane() == 0) lds[gpu::wave() * ROWS + r] = sum[r];
  }
  gpu::barrier();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < GROUP / GPU_WAVE; ++w) total += lds[w * ROWS + thread % ROWS];
  // Summed by all, stored by ROWS: no address of LDS is then made by part of a wave.
  total = gpu::optimization_barrier(total);
  if (thread < ROWS) finish_one(e, total, 0, n0 + thread, 0);
}

}  // namespace gemm

#define DENSE(name, ROW)                                                                                              \
  extern "C" GPU_KERNEL(256) void name(const void* x, const void* b, int x_kind, int b_kind, EPILOGUE_ARGUMENTS) {     \
    GPU_SHARED(float, lds, 256 / GPU_WAVE * gemm::ROWS);                                                              \
    (void)k_per_split;                                                                                                \
    gemm::gemv(gemm::ROW{x, x_kind}, gemm::ROW{b, b_kind}, EPILOGUE, k, lds);                                          \
  }
DENSE(gemv, AlignedRow)
DENSE(gemv_unaligned, AnyRow)

#define FROZEN(format, TAG, ROW)                                                                                      \
  extern "C" GPU_KERNEL(256) void gemv_##format(const void* x, TAG##_PARAMETERS, int x_kind, EPILOGUE_ARGUMENTS) {    \
    GPU_SHARED(float, lds, 256 / GPU_WAVE * gemm::ROWS);                                                              \
    (void)k_per_split;                                                                                                \
    gemm::gemv(gemm::AlignedRow{x, x_kind}, ROW<decltype(TAG##_WEIGHT)>{TAG##_WEIGHT}, EPILOGUE, k, lds);             \
  }
#define WEIGHT(format, TAG) FROZEN(format, TAG, WeightRow)
#define EIGHTS(format, TAG) FROZEN(format, TAG, EightsRow)
WEIGHT_FORMATS(WEIGHT)
EIGHTS_FORMATS(EIGHTS)
