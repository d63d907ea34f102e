// Q4_0, a format of frozen weights (weight_formats.hpp): GGUF's blocks of 32 codes of 4 bits with one float16 scale.
//
//     element i = (codes[i] - 8) * scales[i / 32]; 8 codes in a word, from the lowest bits on
//
// Source: ggml's dequantize_row_q4_0 (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace q4_0 {

struct Weight {
  const unsigned* codes;
  const unsigned short* scales;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8];
    const float scale = (float)__builtin_bit_cast(gpu::half, scales[i / 32]);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = scale * ((float)(word >> (4 * e) & 15u) - 8.0f);
    return x;
  }
};

}  // namespace q4_0

#define Q4_0_PARAMETERS const unsigned *codes, const unsigned short *scales
#define Q4_0_WEIGHT \
  q4_0::Weight { codes, scales }
