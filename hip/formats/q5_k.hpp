// Q5_K, a format of frozen weights (eights_formats.hpp): Q4_K with one bit more to a code.
//
//     fifth: that bit of each code, 8 in a byte, from the lowest on
//
// Source: ggml's dequantize_row_q5_K (github.com/ggml-org/llama.cpp).
#pragma once
#include "q4_k.hpp"

namespace q5_k {

struct Weight {
  const unsigned* codes;
  const gpu::u32x4* scales;
  const unsigned char* fifth;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8], high = fifth[i / 8];
    const q4_k::Group group = q4_k::group_of(scales, i);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned code = (word >> (4 * e) & 15u) | (high >> e & 1u) << 4;
      x.at[e] = group.scale * (float)code - group.least;
    }
    return x;
  }
};

}  // namespace q5_k

#define Q5_K_PARAMETERS const unsigned *codes, const gpu::u32x4 *scales, const unsigned char *fifth
#define Q5_K_WEIGHT \
  q5_k::Weight { codes, scales, fifth }
