// Q4_0, Q4_1, Q5_0 and Q5_1, formats of frozen weights (eights_formats.hpp): GGUF's blocks of 32 codes of 4 or 5 bits
// with one float16 scale, and a float16 minimum where MINIMUM is true.
//
//     element i = (codes[i] - 8) * scale; FIFTH: (codes[i] - 16) * scale; MINIMUM: codes[i] * scale + minimum
//
// 8 codes per word, lowest bits first; their fifth bits are a byte of `high`. With MINIMUM a scale (low half) and a
// minimum share a word. The product is exact in float32: a fused multiply-add gives the same bits.
// Source: ggml's dequantize_row_q4_0 and those of the others (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace q4_q5 {

GPU_FN float widened(unsigned bits) { return (float)__builtin_bit_cast(gpu::half, (unsigned short)bits); }

template <bool FIFTH, bool MINIMUM> struct Weight {
  const unsigned* codes;
  const void* scales;
  const unsigned char* high;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8], fifth = FIFTH ? high[i / 8] : 0u;
    const unsigned pair = MINIMUM ? ((const unsigned*)scales)[i / 32] : ((const unsigned short*)scales)[i / 32];
    const float scale = widened(pair), least = MINIMUM ? widened(pair >> 16) : 0.0f;
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float code = (float)((word >> (4 * e) & 15u) | (fifth >> e & 1u) << 4);
      x.at[e] = MINIMUM ? scale * code + least : scale * (code - (FIFTH ? 16.0f : 8.0f));
    }
    return x;
  }
};

}  // namespace q4_q5

#define Q4_0_PARAMETERS const unsigned *codes, const void *scales
#define Q4_0_WEIGHT \
  q4_q5::Weight<false, false> { codes, scales, nullptr }
#define Q4_1_PARAMETERS Q4_0_PARAMETERS
#define Q4_1_WEIGHT \
  q4_q5::Weight<false, true> { codes, scales, nullptr }
#define Q5_0_PARAMETERS Q4_0_PARAMETERS, const unsigned char *high
#define Q5_0_WEIGHT \
  q4_q5::Weight<true, false> { codes, scales, high }
#define Q5_1_PARAMETERS Q5_0_PARAMETERS
#define Q5_1_WEIGHT \
  q4_q5::Weight<true, true> { codes, scales, high }
