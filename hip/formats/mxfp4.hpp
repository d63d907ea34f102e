// MXFP4, a format of frozen weights (eights_formats.hpp; of experts also weight_formats.hpp): blocks of 32 codes of 4
// bits (E2M1) with one power of two (E8M0).
//
//     element i = twice the value of codes[i] * 2^(exponents[i / 32] - 128); 8 codes per word, lowest bits first
//
// Source: ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace mxfp4 {

GPU_FN float power(unsigned exponent) {
  return gpu::bits_to_float(exponent < 2u ? 0x00200000u << exponent : (exponent - 1u) << 23);
}
// Twice the value of code % 16.
GPU_FN float level(unsigned code) {
  const float size = (float)(0xc8643210u >> (4u * (code & 7u)) & 15u);  // a table of 8 numbers
  return code & 8u ? -size : size;
}

struct Weight {
  const unsigned* codes;
  const unsigned char* exponents;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8];
    const float scale = power(exponents[i / 32]);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = scale * level(word >> (4 * e) & 15u);
    return x;
  }
};

// The interface of weight_formats.hpp.
struct Experts {
  struct Ahead {};
  struct Raw {
    unsigned codes, exponent;
  };
  const unsigned* codes;
  const unsigned char* exponents;
  float table;  // level(lane % 16)

  GPU_FN Ahead look(long, unsigned) const { return {}; }
  GPU_FN Raw fetch(long origin, unsigned offset, int, Ahead) const {
    const long i = origin + (long)offset;
    return Raw{codes[i >> 3], exponents[i >> 5]};
  }
  GPU_FN static void arrive(Raw& raw) {
    raw.codes = gpu::optimization_barrier(raw.codes);
    raw.exponent = gpu::optimization_barrier(raw.exponent);
  }
  GPU_FN float scale(const Raw& raw) const { return power(raw.exponent); }
  GPU_FN float value(const Raw& raw, int i) const { return gpu::lookup16(table, raw.codes, 4 * i); }
};

}  // namespace mxfp4

#define MXFP4_PARAMETERS const unsigned *codes, const unsigned char *exponents
#define MXFP4_WEIGHT \
  mxfp4::Weight { codes, exponents }
#define MXFP4_EXPERTS_PARAMETERS MXFP4_PARAMETERS
#define MXFP4_EXPERTS_WEIGHT \
  mxfp4::Experts { codes, exponents, mxfp4::level(gpu::lane() % 16) }
