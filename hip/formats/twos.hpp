// Q2_K, Q3_K and TQ2_0, formats of frozen weights (eights_formats.hpp): GGUF's blocks of 256 codes; 2 bits of each are
// packed, 8 in 16 bits, lowest first.
//
//     Q2_K:  element i = d scale codes[i] - dmin minimum; a byte per 16 codes: scale (low 4 bits) and minimum; the
//            float16 d (low) and dmin per block
//     Q3_K:  element i = d (scale - 32) (codes[i] - 4); a third bit per code, 8 in a byte; three words per block: the
//            low 4 bits of eight scales (16 codes each), of the other eight, and the high 2 bits of all; a float16 d
//     TQ2_0: element i = d (codes[i] - 1); TQ1_0 has the same layout on the device
//
// Products are exact in float32: a fused multiply-add gives the same bits.
// Sources: ggml's dequantize_row_q2_K, dequantize_row_q3_K and dequantize_row_tq2_0 (github.com/ggml-org/llama.cpp).
#pragma once
#include "levels.hpp"

namespace twos {

using levels::widened;

struct Q2K {
  const unsigned short* codes;
  const unsigned char* scales;
  const unsigned* d;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8], fields = scales[i / 16], head = d[i / 256];
    const float scale = widened(head) * (float)(fields & 15u), least = widened(head >> 16) * (float)(fields >> 4);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = scale * (float)(word >> (2 * e) & 3u) - least;
    return x;
  }
};

struct Q3K {
  const unsigned short* codes;
  const unsigned char* high;
  const unsigned* scales;
  const unsigned short* d;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8], third = high[i / 8], group = i / 16 % 16;
    const unsigned* words = scales + i / 256 * 3;
    const unsigned bits = (words[group / 8] >> (4 * (group % 8)) & 15u) | (words[2] >> (2 * group) & 3u) << 4;
    const float scale = widened(d[i / 256]) * ((float)bits - 32.0f);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned code = (word >> (2 * e) & 3u) | (third >> e & 1u) << 2;
      x.at[e] = scale * ((float)code - 4.0f);
    }
    return x;
  }
};

struct Tq20 {
  const unsigned short* codes;
  const unsigned short* d;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8];
    const float scale = widened(d[i / 256]);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = scale * ((float)(word >> (2 * e) & 3u) - 1.0f);
    return x;
  }
};

}  // namespace twos

#define Q2_K_PARAMETERS const unsigned short *codes, const unsigned char *scales, const unsigned *d
#define Q2_K_WEIGHT \
  twos::Q2K { codes, scales, d }
#define Q3_K_PARAMETERS \
  const unsigned short *codes, const unsigned char *high, const unsigned *scales, const unsigned short *d
#define Q3_K_WEIGHT \
  twos::Q3K { codes, high, scales, d }
#define TQ2_0_PARAMETERS const unsigned short *codes, const unsigned short *d
#define TQ2_0_WEIGHT \
  twos::Tq20 { codes, d }
