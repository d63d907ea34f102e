// Operands as sums of 16-bit pieces, for GEMMs of more than 16 bits of precision on 16-bit tensor cores.
//
//     x = x0 + x1 (+ x2):  bfloat16 pieces, each the upper half of what is left (8 bits), the second of two
//                          rounded: two hold a float16 and 16 bits of a float32, three all of a float32; float16
//                          pieces, each the nearest (11 bits): two hold 22
//
// Subtracting a piece is exact. An infinite operand gives a NaN. Sources have values(raw), 8 float32 each, and
// next<PIECES>(values, p), which takes the p-th piece of them off.
// Sources: Henry, Tang and Heinecke 2019 (bfloat16 triples); Markidis et al. 2018 (float16 pairs).
#pragma once
#include "gemm_epilogue.hpp"

namespace gemm {

GPU_FN gpu::u32x4 take(BF16, gpu::Eight& v, bool rounded) {
  const unsigned half = rounded ? 0x8000u : 0u;
  gpu::u32x4 x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = gpu::high_halves(gpu::float_to_bits(v.at[2 * i]) + half, gpu::float_to_bits(v.at[2 * i + 1]) + half);
#pragma unroll
  for (int i = 0; i < 8; ++i) v.at[i] -= gpu::bits_to_float(gpu::float_to_bits(v.at[i]) & 0xffff0000u);
  return x;
}
GPU_FN gpu::u32x4 take(F16, gpu::Eight& v, bool) {
  gpu::u32x4 x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const gpu::half lo = (gpu::half)v.at[2 * i], hi = (gpu::half)v.at[2 * i + 1];
    x[i] = __builtin_bit_cast(unsigned short, lo) | (unsigned)__builtin_bit_cast(unsigned short, hi) << 16;
    v.at[2 * i] -= (float)lo;
    v.at[2 * i + 1] -= (float)hi;
  }
  return x;
}

// A dense operand of 16 bits that is one piece.
struct OnePiece : Dense<true> {
  GPU_FN static gpu::u32x4 values(gpu::u32x4 raw) { return raw; }
  template <int> GPU_FN static gpu::u32x4 next(gpu::u32x4 raw, int) { return raw; }
};

// float16 in bfloat16 pieces.
struct HalfPieces : Dense<true> {
  GPU_FN static gpu::Eight values(gpu::u32x4 raw) {
    gpu::Eight v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = widen((unsigned short)(raw[i / 2] >> (16 * (i & 1))), F16::KIND);
    return v;
  }
  template <int> GPU_FN static gpu::u32x4 next(gpu::Eight& v, int) { return take(BF16{}, v, false); }
};

// float32 in bfloat16 pieces. Rows are multiples of 8 elements, the address of 16 bytes.
struct FloatPieces {
  struct Raw {
    gpu::u32x4 lo, hi;
  };
  using Ahead = Nothing;
  using Open = Nothing;
  static constexpr bool DECODES = false;
  const float* data;
  GPU_FN Ahead look(long, unsigned) const { return {}; }
  GPU_FN Raw fetch(long origin, unsigned offset, int, Ahead) const {
    const char* p = (const char*)(data + origin) + (unsigned long)(4u * offset);
    return Raw{gpu::load16(p), gpu::load16(p + 16)};
  }
  GPU_FN static gpu::Eight values(const Raw& raw) {
    gpu::Eight v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = gpu::bits_to_float(i < 4 ? raw.lo[i] : raw.hi[i - 4]);
    return v;
  }
  template <int PIECES> GPU_FN static gpu::u32x4 next(gpu::Eight& v, int p) {
    return take(BF16{}, v, PIECES == 2 && p == 1);
  }
};

// A weight of some format, times SCALE, in pieces of T.
template <class T, class Format> struct WeightPieces : Format {
  using Open = Nothing;
  static constexpr bool DECODES = false;
  // float16: the second piece of a usual weight (0.001 to 0.1) would be a subnormal without, and 1,023 still fits.
  static constexpr float SCALE = T::KIND == F16::KIND ? 64.0f : 1.0f;
  GPU_FN gpu::Eight values(const typename Format::Raw& raw) const {
    const float s = SCALE * this->scale(raw);
    gpu::Eight v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = s * this->value(raw, i);
    return v;
  }
  template <int PIECES> GPU_FN static gpu::u32x4 next(gpu::Eight& v, int p) { return take(T{}, v, p == PIECES - 1); }
};

}  // namespace gemm
