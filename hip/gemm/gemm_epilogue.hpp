// The epilogue of a GEMM, on the accumulators of a wave (ROWS x 64 results, in 16 x 16 pieces):
//
//     C[m, n] = alpha * acc + sum_r u[m, r] v[r, n] + bias[n] + residual[m, n] (+ C[m, n] where ACCUMULATE)
//
// all in float32, rounded once. The low-rank term is added to the accumulators in place; then 16 rows at a time go
// through LDS (stage_slot()), so that every architecture stores whole lines, 16 bytes per lane, whatever the layout
// of its tensor cores. Dtypes of arrays: 0 float32, 1 float16, 2 bfloat16.
#pragma once
#include "gemm_matrix.hpp"

namespace gemm {

constexpr int WAVE_N = 64, STAGE_FLOATS = 16 * WAVE_N;
// Flags. V_ALONG_RANK: v is [N, r], otherwise [r, N]. UNALIGNED: c, bias or residual start at no multiple of 16 bytes.
// SWAPPED: the tile is one of the transposed result (gemm_skinny.hip).
enum { HAS_ACCUMULATE = 1, V_ALONG_RANK = 2, UNALIGNED = 4, SWAPPED = 8 };

struct Epilogue {
  void* c;
  const float* bias;
  const void* residual;
  const void* u;
  const void* v;
  int m, n, rank;
  int c_kind, residual_kind, u_kind, v_kind, flags;
  float alpha;
};

GPU_FN float widen(unsigned short bits, int kind) {
  const float narrow = (float)__builtin_bit_cast(gpu::half, bits);
  return kind == 2 ? __builtin_bit_cast(float, (unsigned)bits << 16) : narrow;
}
GPU_FN float read(const void* p, int kind, long i) {
  return kind == 0 ? ((const float*)p)[i] : widen(((const unsigned short*)p)[i], kind);
}
GPU_FN gpu::f32x4 read4(const void* p, int kind, long i) {
  if (kind == 0) return *(const gpu::f32x4*)((const float*)p + i);
  typedef unsigned short u16x4 __attribute__((ext_vector_type(4)));
  const u16x4 x = *(const u16x4*)((const unsigned short*)p + i);
  return gpu::f32x4{widen(x[0], kind), widen(x[1], kind), widen(x[2], kind), widen(x[3], kind)};
}
GPU_FN void write(void* p, int kind, long i, float x) {
  if (kind == 0) ((float*)p)[i] = x;
  else ((unsigned short*)p)[i] = kind == 1 ? F16::bits(x) : BF16::bits(x);
}
GPU_FN void write4(void* p, int kind, long i, gpu::f32x4 x) {
  if (kind == 0) *(gpu::f32x4*)((float*)p + i) = x;
  else if (kind == 1) *(gpu::u32x2*)((unsigned short*)p + i) = gpu::u32x2{F16::pack(x[0], x[1]), F16::pack(x[2], x[3])};
  else *(gpu::u32x2*)((unsigned short*)p + i) = gpu::u32x2{BF16::pack(x[0], x[1]), BF16::pack(x[2], x[3])};
}

GPU_FN float v_at(const Epilogue& e, int n, int r) {
  const bool inside = n < e.n && r < e.rank;
  const long i = e.flags & V_ALONG_RANK ? (long)n * e.rank + r : (long)r * e.n + n;
  const float x = read(e.v, e.v_kind, inside ? i : 0);
  return inside ? x : 0.0f;
}
GPU_FN float u_at(const Epilogue& e, int m, int r) {
  const bool inside = m < e.m && r < e.rank;
  const float x = read(e.u, e.u_kind, inside ? (long)m * e.rank + r : 0);
  return inside ? x : 0.0f;
}

// acc += u v for the pieces of a wave whose first result is (m0, n0).
template <class U, int TM, int TN>
GPU_FN void add_low_rank(const Epilogue& e, typename U::Acc (&acc)[TM][TN], int m0, int n0, int lane) {
#if GPU_CDNA  // float32 on the tensor cores: 4 of the rank at a time, and exactly float32
#pragma unroll 1
  for (int r = lane / 16; r < e.rank + lane / 16; r += 4) {
    float v[TN];
#pragma unroll
    for (int j = 0; j < TN; ++j) v[j] = v_at(e, n0 + 16 * j + lane % 16, r);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const float u = u_at(e, m0 + 16 * i + lane % 16, r);
#pragma unroll
      for (int j = 0; j < TN; ++j) acc[i][j] = gpu::mfma_f32_16x16x4_f32(v[j], u, acc[i][j]);
    }
  }
#else
#pragma unroll 1
  for (int r = 0; r < e.rank; ++r) {
    float v[TN][U::CONTIGUOUS];
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll
      for (int c = 0; c < U::CONTIGUOUS; ++c) v[j][c] = v_at(e, n0 + 16 * j + U::column(lane, c), r);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      gpu::sched_fence();  // or the loads of all pieces come first, and their results are spilled
#pragma unroll
      for (int k = 0; k < U::ELEMENTS; ++k) {
        const float u = u_at(e, m0 + 16 * i + U::row(lane, k), r);  // RDNA4: the same for all k
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j][k] += u * v[j][k % U::CONTIGUOUS];
      }
    }
  }
#endif
}

// Finishes and stores one result: bias, residual, and the old value where ACCUMULATE.
GPU_FN void finish_one(const Epilogue& e, float x, int m, int n, long batch_offset) {
  if (m >= e.m || n >= e.n) return;
  const long at = (long)m * e.n + n;
  if (e.bias) x += e.bias[n];
  if (e.residual) x += read(e.residual, e.residual_kind, at);
  if (e.flags & HAS_ACCUMULATE) x += read(e.c, e.c_kind, batch_offset + at);
  write(e.c, e.c_kind, batch_offset + at, x);
}

// 4 results of a row at once where they are aligned.
GPU_FN void finish(const Epilogue& e, gpu::f32x4 x, int m, int n, long batch_offset) {
  if (m >= e.m || n >= e.n) return;
  const long at = (long)m * e.n + n;
  if (e.n % 4 == 0 && !(e.flags & UNALIGNED)) {
    if (e.bias) x += *(const gpu::f32x4*)(e.bias + n);
    if (e.residual) x += read4(e.residual, e.residual_kind, at);
    if (e.flags & HAS_ACCUMULATE) x += read4(e.c, e.c_kind, batch_offset + at);
    write4(e.c, e.c_kind, batch_offset + at, x);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i)
    finish_one(e, i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3], m, n + i, batch_offset);
}

// Where 4 floats of a wave's 16 x 64 lie in LDS, in 16 bytes. CDNA and RDNA4 store a column of eight rows at a time;
// RDNA3 stores two rows of 16 floats. All read rows, CDNA half of one with the other half of the next.
GPU_FN int stage_slot(int row, int four) { return row * (WAVE_N / 4) + (four ^ (GPU_RDNA3 ? row % 2 * 4 : row % 8)); }
template <class U> GPU_FN void put_piece(float* stage, typename U::Acc acc, int j, int lane) {
#pragma unroll
  for (int k = 0; k < U::ELEMENTS; k += U::CONTIGUOUS) {
    const int column = 16 * j + U::column(lane, k), row = U::row(lane, k);
    if constexpr (U::CONTIGUOUS == 1) {
      stage[4 * stage_slot(row, column / 4) + column % 4] = acc[k];
    } else {
#pragma unroll
      for (int c = 0; c < U::CONTIGUOUS; c += 4)
        ((gpu::f32x4*)stage)[stage_slot(row, column / 4 + c / 4)] =
            gpu::f32x4{acc[k + c], acc[k + c + 1], acc[k + c + 2], acc[k + c + 3]};
    }
  }
}

// `stage`: STAGE_FLOATS of LDS of this wave. Every wave of the group calls this (it holds barriers).
template <class U, int TM, int TN>
GPU_FN void epilogue(const Epilogue& e, typename U::Acc (&acc)[TM][TN], float* stage, int m0, int n0, int lane,
                     long batch_offset) {
  static_assert(16 * TN == WAVE_N, "a wave owns 64 columns");
#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j) acc[i][j] *= e.alpha;
  if (e.rank > 0) add_low_rank<U, TM, TN>(e, acc, m0, n0, lane);
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    gpu::local_barrier();
#pragma unroll
    for (int j = 0; j < TN; ++j) put_piece<U>(stage, acc[i][j], j, lane);
    gpu::local_barrier();
#pragma unroll 1
    for (int group = lane; group < 16 * WAVE_N / 4; group += GPU_WAVE) {
      const int row = group / (WAVE_N / 4), four = group % (WAVE_N / 4);
      finish(e, ((const gpu::f32x4*)stage)[stage_slot(row, four)], m0 + 16 * i + row, n0 + 4 * four, batch_offset);
    }
  }
}

}  // namespace gemm

// The arguments that follow a GEMM's operands, and the Epilogue made of them.
#define EPILOGUE_ARGUMENTS                                                                                             \
  void *c, const float *bias, const void *residual, const void *u, const void *v, int m, int n, int k,                 \
      int k_per_split, int rank, int c_kind, int residual_kind, int u_kind, int v_kind, int flags, float alpha
#define EPILOGUE                                                                                                      \
  gemm::Epilogue { c, bias, residual, u, v, m, n, rank, c_kind, residual_kind, u_kind, v_kind, flags, alpha }
