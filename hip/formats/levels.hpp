// IQ4_NL, IQ4_XS and NVFP4, formats of frozen weights (eights_formats.hpp): 4-bit codes of sixteen levels.
//
//     element i = scale of its group * levels[codes[i]]; 8 codes per word, lowest bits first
//     IQ4_NL: a float16 per 32 elements
//     IQ4_XS: d * (scale - 32): two words per 256: the float16 d (low) and the high 2 bits of eight scales; their low 4
//         bits
//     NVFP4: a byte per 16: E4M3, where the sign is ignored and 127 is 0; levels are twice the codes' values
//
// Sources: ggml's dequantize_row_iq4_nl, dequantize_row_iq4_xs and dequantize_row_nvfp4
// (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace levels {

GPU_FN float widened(unsigned bits) { return (float)__builtin_bit_cast(gpu::half, (unsigned short)bits); }

// Four signed bytes a word.
GPU_FN float uneven(unsigned code) {
  const unsigned low = code & 4u ? 0xf6eaddcfu : 0xbfad9881u, high = code & 4u ? 0x71594535u : 0x26190d01u;
  return (float)(signed char)((code & 8u ? high : low) >> (8u * (code & 3u)));
}
GPU_FN float doubled_e2m1(unsigned code) {
  const float size = (float)(0xc8643210u >> (4u * (code & 7u)) & 15u);
  return code & 8u ? -size : size;
}

struct HalfScales {
  const unsigned short* scales;
  GPU_FN float of(long i) const { return widened(scales[i / 32]); }
  GPU_FN static float level(unsigned code) { return uneven(code); }
};
struct SixBitScales {
  const unsigned* scales;
  GPU_FN float of(long i) const {
    const unsigned head = scales[i / 256 * 2], low = scales[i / 256 * 2 + 1], group = i / 32 % 8;
    const unsigned scale = (low >> (4 * group) & 15u) | (head >> (2 * group + 16) & 3u) << 4;
    return widened(head) * ((float)scale - 32.0f);
  }
  GPU_FN static float level(unsigned code) { return uneven(code); }
};
struct ByteScales {
  const unsigned char* scales;
  GPU_FN float of(long i) const {
    const unsigned code = scales[i / 16], exponent = code >> 3 & 15u;
    const float value = gpu::bits_to_float(((code & 127u) << 20) + 0x3b800000u);  // exponent + 119: half the value
    const float small = 2.0f * value - 0.0078125f;  // without its leading one
    return code == 127u ? 0.0f : exponent ? value : small;
  }
  GPU_FN static float level(unsigned code) { return doubled_e2m1(code); }
};

template <class Scales> struct Weight {
  const unsigned* codes;
  Scales scales;

  GPU_FN gpu::Eight eight(long i) const {
    const unsigned word = codes[i / 8];
    const float scale = scales.of(i);
    gpu::Eight x;
#pragma unroll
    for (int e = 0; e < 8; ++e) x.at[e] = scale * Scales::level(word >> (4 * e) & 15u);
    return x;
  }
};

}  // namespace levels

#define IQ4_NL_PARAMETERS const unsigned *codes, const unsigned short *scales
#define IQ4_NL_WEIGHT \
  levels::Weight<levels::HalfScales> { codes, { scales } }
#define IQ4_XS_PARAMETERS const unsigned *codes, const unsigned *scales
#define IQ4_XS_WEIGHT \
  levels::Weight<levels::SixBitScales> { codes, { scales } }
#define NVFP4_PARAMETERS const unsigned *codes, const unsigned char *scales
#define NVFP4_WEIGHT \
  levels::Weight<levels::ByteScales> { codes, { scales } }
