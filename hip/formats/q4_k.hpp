// Q4_K, a format of frozen weights (eights_formats.hpp): GGUF's blocks of 256 4-bit codes, with a scale and a minimum
// of 6 bits for each 32.
//
//     element i = d scale codes[i] - dmin minimum; 8 codes per word, lowest bits first
//     scales: four words per block: the float16 d (low) and dmin; the low 4 bits of the eight scales; of the eight
//         minima; the high 2 bits of the scales, then of the minima
//
// Both products are exact in float32: a fused multiply-add gives the same bits.
// Source: ggml's dequantize_row_q4_K (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace q4_k {

struct Group {
  float scale, least;
};
GPU_FN float half_of(unsigned bits) { return (float)__builtin_bit_cast(gpu::half, (unsigned short)bits); }
// The group of element i.
GPU_FN Group group_of(const gpu::u32x4* scales, long i) {
  const gpu::u32x4 words = gpu::load16(scales + i / 256);
  const unsigned group = i / 32 % 8;
  const unsigned scale = (words[1] >> (4 * group) & 15u) | (words[3] >> (2 * group) & 3u) << 4;
  const unsigned least = (words[2] >> (4 * group) & 15u) | (words[3] >> (2 * group + 16) & 3u) << 4;
  return Group{half_of(words[0]) * (float)scale, half_of(words[0] >> 16) * (float)least};
}

struct Weight {
  const unsigned* codes;
  const gpu::u32x4* scales;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8];
    const Group group = group_of(scales, i);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = group.scale * (float)(word >> (4 * e) & 15u) - group.least;
    return x;
  }
};

}  // namespace q4_k

#define Q4_K_PARAMETERS const unsigned *codes, const gpu::u32x4 *scales
#define Q4_K_WEIGHT \
  q4_k::Weight { codes, scales }
