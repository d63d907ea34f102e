// Q6_K, a format of frozen weights (eights_formats.hpp): GGUF's blocks of 256 codes of 6 bits, with a scale of 8
// bits for each 16.
//
//     element i = d[i / 256] * scales[i / 16] * (code - 32); the low 4 bits of 8
//     codes per word, their high 2 bits in 16 bits, lowest first
//
// Source: ggml's dequantize_row_q6_K (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace q6_k {

struct Weight {
  const unsigned* codes;
  const unsigned short* high;
  const signed char* scales;
  const unsigned short* d;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned low = codes[i / 8], top = high[i / 8];
    const float scale = (float)__builtin_bit_cast(gpu::half, d[i / 256]) * (float)scales[i / 16];
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned code = (low >> (4 * e) & 15u) | (top >> (2 * e) & 3u) << 4;
      x.at[e] = scale * ((float)code - 32.0f);
    }
    return x;
  }
};

}  // namespace q6_k

#define Q6_K_PARAMETERS \
  const unsigned *codes, const unsigned short *high, const signed char *scales, const unsigned short *d
#define Q6_K_WEIGHT \
  q6_k::Weight { codes, high, scales, d }
