// IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S, formats of frozen weights (eights_formats.hpp): of each CELL elements (8 or 4) the
// number of an entry in a table.
//
//     element i = d (2 scale + 1) FACTOR * its share of the entry, or its negative
//     codes: a byte, the low 8 bits of a number
//     grid, from the lowest bits on: of CELL 8 16 bits an entry: 2 bits an element, 0 to 2 for 8, 25, 43; FORM 0 of CELL 4: a
//     word an entry, 5 bits an element, half of it; FORM 2 of CELL 4: 16 bits an entry, 4 bits an element
//     FORM 0 (XXS): signs: a word of each 32: 7 bits of each 8, the last makes their number even; 4 bits of a scale
//     FORM 1 (IQ2_XS): signs: a byte of each 8: 7 bits, and the number's ninth
//     FORM 2 (S): signs: a byte of each 8; high: a byte of each 32, the bits of their numbers above the low 8
//     d: a float16 of each 256; but of FORM 0 then 4 bits of the scale of each 16 elements or, where CELL is 4, 32
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
