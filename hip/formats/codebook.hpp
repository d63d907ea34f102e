// IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S, formats of frozen weights (eights_formats.hpp): for each CELL elements (8
// or 4) the number of an entry in a table.
//
//     element i = +- d (2 scale + 1) FACTOR * its part of the entry
//     codes: the low 8 bits of the entry's number, a byte each
//     signs: a word per 32 elements: the sign of element 8c + 4h + j at bit 8j + 4h + c; IQ3_S: that of element
//         16g + 4q + j at bit 16g + 4j + q. In FORM 0 and 1 the highest 4 bits, the last sign of each 8 elements, are
//         missing: they make the number of negative elements even
//     d: a float16 per 256 elements
//     grid: a byte per element, larger by 128; IQ3_S: 4 bits of a word, the lowest at bit 1, for elements of -15, -13, ..
//         to 15
//     FORM 0 (XXS): the highest 4 bits of signs: a scale
//     FORM 1 (IQ2_XS): the highest 4 bits of signs: the ninth bits of four entries' numbers; more: scales, 4 bits per 16
//         elements
//     FORM 2 (S): more: bits of entries' numbers above their low 8, and scales of 4 bits. CELL 8: for 32 elements a byte
//         of four times 2 bits, and a byte of two scales. CELL 4: twelve bytes for 256 elements: 64 bits, and eight
//         scales
//
// Products are exact in float32.
// Source: ggml's dequantize_row_iq2_xxs and those of the others (github.com/ggml-org/llama.cpp).
#pragma once
#include "levels.hpp"

namespace codebook {

template <int FORM, int CELL> struct Weight {
  const unsigned char* codes;
  const unsigned* signs;
  const unsigned short* d;
  const unsigned* grid;
  const unsigned char* more;

  GPU_FN gpu::Eight eight(long i) const {
    constexpr bool NIBBLES = FORM == 2 && CELL == 4;
    const unsigned cell = i / 8 % 4;  // of 32 elements
    unsigned sign = signs[i / 32], scale, above = 0;
    if constexpr (FORM == 0) {
      scale = sign >> 28;
    } else if constexpr (FORM == 1) {
      above = sign >> (28 + cell) & 1u;
      scale = more[i / 32] >> (4 * (i / 16 % 2)) & 15u;
    } else if constexpr (CELL == 8) {
      above = more[i / 32 * 2] >> (2 * cell) & 3u;
      scale = more[i / 32 * 2 + 1] >> (4 * (i / 16 % 2)) & 15u;
    } else {
      const unsigned char* bytes = more + i / 256 * 12;
      above = bytes[i / 32 % 8] >> (2 * cell) & 3u;
      scale = bytes[8 + i / 64 % 4] >> (4 * (i / 32 % 2)) & 15u;
    }
    if constexpr (FORM != 2) {
      sign &= 0x0fffffffu;
      sign |= (__builtin_popcount(sign & 0x11111111u << cell) & 1u) << (28 + cell);
    }
    unsigned entries[2];  // of each four elements
    if constexpr (CELL == 8) {
      const unsigned at = 2 * (codes[i / 8] | above << 8);
      entries[0] = grid[at], entries[1] = grid[at + 1];
    } else {
      entries[0] = grid[codes[i / 4] | (above & 1u) << 8], entries[1] = grid[codes[i / 4 + 1] | (above & 2u) << 7];
    }
    const float factor = CELL == 8 ? 0.125f : FORM == 0 ? 0.25f : 1.0f;
    const float size = levels::widened(d[i / 256]) * (2.0f * (float)scale + 1.0f) * factor;
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned h = e / 4, j = e % 4;
      const unsigned place = NIBBLES ? 16 * (cell / 2) + 4 * j + 2 * (cell % 2) + h : 8 * j + 4 * h + cell;
      const float entry = NIBBLES ? 2.0f * (float)(entries[h] >> (4 * j + 1) & 15u) - 15.0f
                                  : (float)(entries[h] >> (8 * j) & 255u) - 128.0f;
      const float value = size * entry;
      x.at[e] = sign >> place & 1u ? -value : value;
    }
    return x;
  }
};

}  // namespace codebook

#define IQ2_XXS_PARAMETERS \
  const unsigned char *codes, const unsigned *signs, const unsigned short *d, const unsigned *grid
#define IQ2_XXS_WEIGHT \
  codebook::Weight<0, 8> { codes, signs, d, grid, nullptr }
#define IQ3_XXS_PARAMETERS IQ2_XXS_PARAMETERS
#define IQ3_XXS_WEIGHT \
  codebook::Weight<0, 4> { codes, signs, d, grid, nullptr }
#define IQ2_XS_PARAMETERS IQ2_XXS_PARAMETERS, const unsigned char *more
#define IQ2_XS_WEIGHT \
  codebook::Weight<1, 8> { codes, signs, d, grid, more }
#define IQ2_S_PARAMETERS IQ2_XS_PARAMETERS
#define IQ2_S_WEIGHT \
  codebook::Weight<2, 8> { codes, signs, d, grid, more }
#define IQ3_S_PARAMETERS IQ2_XS_PARAMETERS
#define IQ3_S_WEIGHT \
  codebook::Weight<2, 4> { codes, signs, d, grid, more }
