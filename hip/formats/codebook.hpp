// IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S, formats of frozen weights (eights_formats.hpp): for each CELL elements (8
// or 4) the number of an entry in a table.
//
//     element i = +- d (2 scale + 1) FACTOR * its part of the entry
//     codes: the low 8 bits of the entry's number, a byte each
//     grid: CELL 8: 16 bits per entry, 2 bits per element: 0, 1, 2 stand for 8, 25, 43; CELL 4, FORM 0: a word per
//         entry, 5 bits per element, half of its value; FORM 2: 16 bits per entry, 4 bits per element; lowest first
//     FORM 0 (XXS): signs: a word per 32 elements: 7 sign bits per 8 (the eighth makes their number even) and a scale
//         of 4 bits
//     FORM 1 (IQ2_XS): signs: a byte per 8: 7 sign bits, and the ninth bit of the entry's number
//     FORM 2 (S): signs: a byte per 8; high: a byte per 32, the entries' numbers above their low 8 bits
//     d: a float16 per 256, then (not FORM 0) scales of 4 bits, one per 16 elements, or per 32 where CELL is 4
//
// Products are exact in float32.
// Source: ggml's dequantize_row_iq2_xxs and those of the others (github.com/ggml-org/llama.cpp).
#pragma once
#include "levels.hpp"

namespace codebook {

template <int FORM, int CELL> struct Weight {
  const unsigned char* codes;
  const unsigned char* signs;
  const unsigned short* d;
  const unsigned short* grid;
  const unsigned char* high;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned eighth = i / 8 % 4;  // of 32 elements
    unsigned sign, scale, head;
    if constexpr (FORM == 0) {
      const unsigned word = ((const unsigned*)signs)[i / 32];
      sign = word >> (7 * eighth) & 127u;
      scale = word >> 28;
      head = d[i / 256];
    } else {
      const unsigned short* halves = d + i / 256 * (CELL == 8 ? 5 : 3);
      const unsigned group = CELL == 8 ? i / 16 % 16 : i / 32 % 8;
      sign = signs[i / 8];
      scale = halves[1 + group / 4] >> (4 * (group % 4)) & 15u;
      head = halves[0];
    }
    constexpr int BITS = CELL == 8 ? 2 : FORM == 0 ? 5 : 4;
    unsigned entries[2];  // of each four elements, BITS each
    if constexpr (CELL == 8) {
      unsigned entry = codes[i / 8];
      if constexpr (FORM == 1) entry |= (sign & 128u) << 1;
      if constexpr (FORM == 2) entry |= (high[i / 32] >> (2 * eighth) & 3u) << 8;
      entries[0] = grid[entry], entries[1] = entries[0] >> 8;
    } else {
      unsigned first = codes[i / 4], second = codes[i / 4 + 1];
      if constexpr (FORM == 2) {
        const unsigned bits = high[i / 32] >> (2 * eighth);
        first |= (bits & 1u) << 8, second |= (bits >> 1 & 1u) << 8;
      }
      if constexpr (FORM == 0) {
        entries[0] = ((const unsigned*)grid)[first], entries[1] = ((const unsigned*)grid)[second];
      } else {
        entries[0] = grid[first], entries[1] = grid[second];
      }
    }
    if constexpr (FORM != 2) sign = (sign & 127u) | (__builtin_popcount(sign & 127u) & 1u) << 7;
    const float factor = CELL == 8 ? 0.125f : FORM == 0 ? 0.5f : 1.0f;
    const float size = levels::widened(head) * (2.0f * (float)scale + 1.0f) * factor;
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float level = (float)(entries[e / 4] >> (BITS * (e % 4)) & ((1u << BITS) - 1));
      const float entry = CELL == 8 ? level * (0.5f * level + 16.5f) + 8.0f : level;
      const float value = size * entry;
      x.at[e] = sign >> e & 1u ? -value : value;
    }
    return x;
  }
};

}  // namespace codebook

#define IQ2_XXS_PARAMETERS \
  const unsigned char *codes, const unsigned char *signs, const unsigned short *d, const unsigned short *grid
#define IQ2_XXS_WEIGHT \
  codebook::Weight<0, 8> { codes, signs, d, grid, nullptr }
#define IQ3_XXS_PARAMETERS IQ2_XXS_PARAMETERS
#define IQ3_XXS_WEIGHT \
  codebook::Weight<0, 4> { codes, signs, d, grid, nullptr }
#define IQ2_XS_PARAMETERS IQ2_XXS_PARAMETERS
#define IQ2_XS_WEIGHT \
  codebook::Weight<1, 8> { codes, signs, d, grid, nullptr }
#define IQ2_S_PARAMETERS IQ2_XXS_PARAMETERS, const unsigned char *high
#define IQ2_S_WEIGHT \
  codebook::Weight<2, 8> { codes, signs, d, grid, high }
#define IQ3_S_PARAMETERS IQ2_S_PARAMETERS
#define IQ3_S_WEIGHT \
  codebook::Weight<2, 4> { codes, signs, d, grid, high }
