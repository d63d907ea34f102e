// MXFP4, a format of frozen weights (eights_formats.hpp): blocks of 32 codes of 4 bits (E2M1) with one power of two (E8M0).
//
//     element i = twice the value of codes[i] * 2^(exponents[i / 32] - 128); 8 codes in a word, from the lowest bits on
//
// Source: ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace mxfp4 {

struct Weight {
  const unsigned* codes;
  const unsigned char* exponents;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8], exponent = exponents[i / 32];
    const float scale = gpu::bits_to_float(exponent < 2u ? 0x00200000u << exponent : (exponent - 1u) << 23);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned code = word >> (4 * e) & 15u;
      const float size = (float)(0xc8643210u >> (4u * (code & 7u)) & 15u);  // a table of 8 numbers
      x.at[e] = scale * (code & 8u ? -size : size);
    }
    return x;
  }
};

}  // namespace mxfp4

#define MXFP4_PARAMETERS const unsigned *codes, const unsigned char *exponents
#define MXFP4_WEIGHT \
  mxfp4::Weight { codes, exponents }
