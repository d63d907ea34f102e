// One interface to the tensor cores of all architectures: a fragment of 16 rows x DEPTH of an operand, read from LDS,
// and acc += A B^T of two fragments. row() and column() give the position of an element of `acc`.
//
// A fragment starts at a row that is a multiple of 16, so that slot() splits into a part of the lane and one of the
// row. It covers DEPTH / LOADS of K and feeds STEPS instructions.
//
//   CDNA (MFMA 16x16x16, wave64)   lane l holds K chunk l / 16 (8 elements) of row l % 16: one 128-bit LDS read feeds
//                                  two instructions (the order of K is free as long as A and B agree). B goes in as the
//                                  first operand, which transposes the result: m = l % 16, n = 4 (l / 16) + e. CDNA4
//                                  has one instruction (16x16x32) for both steps, at the price of one: step 1 has it.
//   RDNA4 (WMMA, wave32)           lane l holds K chunk 2 s + l / 16 of row l % 16 for instruction s; result transposed
//                                  likewise: m = l % 16, n = 8 (l / 16) + e.
//   RDNA3 (WMMA, wave32)           every lane holds 16 elements of row l % 16, lanes 16-31 the same as 0-15;
//                                  m = 2 e + l / 16, n = l % 16.
//
// Sources: AMD "CDNA3" and "RDNA3"/"RDNA4 Instruction Set Architecture" (matrix layouts).
#pragma once
#include "gemm_tile.hpp"

namespace gemm {

struct F16 {
  static constexpr int KIND = 1;
  GPU_FN static unsigned short bits(float x) { return __builtin_bit_cast(unsigned short, (gpu::half)x); }
  GPU_FN static unsigned pack(float lo, float hi) { return bits(lo) | (unsigned)bits(hi) << 16; }
  GPU_FN static unsigned pack_finite(float lo, float hi) { return pack(lo, hi); }
};
struct BF16 {
  static constexpr int KIND = 2;
  GPU_FN static unsigned short bits(float x) { return gpu::float_to_bf16_bits(x); }
  GPU_FN static unsigned pack(float lo, float hi) { return bits(lo) | (unsigned)bits(hi) << 16; }
  // Of decoded weights, which are no NaN: half the instructions.
  GPU_FN static unsigned rounded(unsigned u) { return u + 0x7fffu + (u >> 16 & 1u); }
  GPU_FN static unsigned pack_finite(float lo, float hi) {
    return gpu::high_halves(rounded(gpu::float_to_bits(lo)), rounded(gpu::float_to_bits(hi)));
  }
};

#if GPU_CDNA

GPU_FN gpu::f32x4 mma16(F16, gpu::u32x2 a, gpu::u32x2 b, gpu::f32x4 c) {
  return gpu::mfma_f32_16x16x16_f16(__builtin_bit_cast(gpu::f16x4, a), __builtin_bit_cast(gpu::f16x4, b), c);
}
GPU_FN gpu::f32x4 mma16(BF16, gpu::u32x2 a, gpu::u32x2 b, gpu::f32x4 c) {
  return gpu::mfma_f32_16x16x16_bf16(__builtin_bit_cast(gpu::bf16x4, a), __builtin_bit_cast(gpu::bf16x4, b), c);
}
#if GPU_CDNA4
GPU_FN gpu::f32x4 mma32(F16, gpu::u32x4 a, gpu::u32x4 b, gpu::f32x4 c) {
  return gpu::mfma_f32_16x16x32_f16(__builtin_bit_cast(gpu::f16x8, a), __builtin_bit_cast(gpu::f16x8, b), c);
}
GPU_FN gpu::f32x4 mma32(BF16, gpu::u32x4 a, gpu::u32x4 b, gpu::f32x4 c) {
  return gpu::mfma_f32_16x16x32_bf16(__builtin_bit_cast(gpu::bf16x8, a), __builtin_bit_cast(gpu::bf16x8, b), c);
}
#endif
template <class T> struct Unit {
  static constexpr int LOADS = 1, STEPS = 2, ELEMENTS = 4, CONTIGUOUS = 4;
  using Fragment = gpu::u32x4;
  using Acc = gpu::f32x4;
  GPU_FN static Fragment load(const gpu::u32x4* lds, int row0, int, int lane) {
    return lds[4 * row0 + slot(lane % 16, lane / 16)];
  }
  GPU_FN static Acc mma(int step, Fragment a, Fragment b, Acc c) {
#if GPU_CDNA4
    return step ? mma32(T{}, b, a, c) : c;
#else
    return step ? mma16(T{}, b.hi, a.hi, c) : mma16(T{}, b.lo, a.lo, c);
#endif
  }
  GPU_FN static int row(int lane, int) { return lane % 16; }
  GPU_FN static int column(int lane, int e) { return 4 * (lane / 16) + e; }
};

#elif GPU_RDNA4

template <class T> struct Unit {
  static constexpr int LOADS = 2, STEPS = 1, ELEMENTS = 8, CONTIGUOUS = 8;
  using Fragment = gpu::u32x4;
  using Acc = gpu::f32x8;
  GPU_FN static Fragment load(const gpu::u32x4* lds, int row0, int part, int lane) {
    return lds[4 * row0 + slot(lane % 16, 2 * part + lane / 16)];
  }
  GPU_FN static Acc wmma(F16, gpu::u32x4 a, gpu::u32x4 b, Acc c) {
    return gpu::wmma_f32_16x16x16_f16(__builtin_bit_cast(gpu::f16x8, a), __builtin_bit_cast(gpu::f16x8, b), c);
  }
  GPU_FN static Acc wmma(BF16, gpu::u32x4 a, gpu::u32x4 b, Acc c) {
    return gpu::wmma_f32_16x16x16_bf16(__builtin_bit_cast(gpu::bf16x8, a), __builtin_bit_cast(gpu::bf16x8, b), c);
  }
  GPU_FN static Acc mma(int, Fragment a, Fragment b, Acc c) { return wmma(T{}, b, a, c); }
  GPU_FN static int row(int lane, int) { return lane % 16; }
  GPU_FN static int column(int lane, int e) { return 8 * (lane / 16) + e; }
};

#else  // RDNA3

typedef unsigned u32x8 __attribute__((ext_vector_type(8)));
template <class T> struct Unit {
  static constexpr int LOADS = 2, STEPS = 1, ELEMENTS = 8, CONTIGUOUS = 1;
  using Fragment = u32x8;
  using Acc = gpu::f32x8;
  GPU_FN static Fragment load(const gpu::u32x4* lds, int row0, int part, int lane) {
    Fragment f;
    f.lo = lds[4 * row0 + slot(lane % 16, 2 * part)];
    f.hi = lds[4 * row0 + slot(lane % 16, 2 * part + 1)];
    return f;
  }
  GPU_FN static Acc wmma(F16, u32x8 a, u32x8 b, Acc c) {
    return gpu::wmma_f32_16x16x16_f16(__builtin_bit_cast(gpu::f16x16, a), __builtin_bit_cast(gpu::f16x16, b), c);
  }
  GPU_FN static Acc wmma(BF16, u32x8 a, u32x8 b, Acc c) {
    return gpu::wmma_f32_16x16x16_bf16(__builtin_bit_cast(gpu::bf16x16, a), __builtin_bit_cast(gpu::bf16x16, b), c);
  }
  GPU_FN static Acc mma(int, Fragment a, Fragment b, Acc c) { return wmma(T{}, a, b, c); }
  GPU_FN static int row(int lane, int e) { return 2 * e + lane / 16; }
  GPU_FN static int column(int lane, int) { return lane % 16; }
};

#endif

}  // namespace gemm
