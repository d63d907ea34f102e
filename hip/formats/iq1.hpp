// IQ1_S and IQ1_M, formats of frozen weights (eights_formats.hpp): for each 8 elements an entry of a table of -1, 0 and
// 1, shifted up or down by an eighth.
//
//     element i = d (2 scale + 1) (its part of the entry +- 0.125)
//     codes: the low 8 bits of the entry's number, a byte each
//     IQ1_S: heads: 16 bits per 32 elements: the high 3 bits of four numbers, a scale of 3 bits, 1 bit to shift down
//     IQ1_M: heads: 4 bits per 8: the high 3 bits of the number, 1 bit to shift down; d: 16 bits per 64: four scales of
//         3 bits (16 elements each), then 4 bits of the float16 d of 256, lowest first
//     grid: 2 bits per element, lowest first: 0, 1, 2 stand for -1, 0, 1
//
// Sources: ggml's dequantize_row_iq1_s and dequantize_row_iq1_m (github.com/ggml-org/llama.cpp).
#pragma once
#include "levels.hpp"

namespace iq1 {

template <bool MEDIUM> struct Weight {
  const unsigned char* codes;
  const unsigned short* heads;
  const unsigned short* d;
  const unsigned short* grid;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned eighth = i / 8 % 4, word = heads[i / 32];
    unsigned scale, half, high, down;
    if constexpr (MEDIUM) {
      const unsigned short* words = d + i / 256 * 4;
      scale = words[i / 64 % 4] >> (3 * (i / 16 % 4)) & 7u;
      half = words[0] >> 12 | (words[1] >> 12) << 4 | (words[2] >> 12) << 8 | (words[3] >> 12) << 12;
      high = word >> (4 * eighth) & 7u, down = word >> (4 * eighth + 3) & 1u;
    } else {
      scale = word >> 12 & 7u, half = d[i / 256];
      high = word >> (3 * eighth) & 7u, down = word >> 15;
    }
    const unsigned entry = grid[codes[i / 8] | high << 8];
    const float size = levels::widened(half) * (2.0f * (float)scale + 1.0f), least = down ? 1.125f : 0.875f;
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = size * ((float)(entry >> (2 * e) & 3u) - least);
    return x;
  }
};

}  // namespace iq1

#define IQ1_S_PARAMETERS \
  const unsigned char *codes, const unsigned short *heads, const unsigned short *d, const unsigned short *grid
#define IQ1_S_WEIGHT \
  iq1::Weight<false> { codes, heads, d, grid }
#define IQ1_M_PARAMETERS IQ1_S_PARAMETERS
#define IQ1_M_WEIGHT \
  iq1::Weight<true> { codes, heads, d, grid }
