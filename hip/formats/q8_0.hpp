// Q8_0, a format of frozen weights (weight_formats.hpp): GGUF's blocks of 32 int8 codes with one float16 scale.
//
//     element i = codes[i] * scales[i / 32]; rows are multiples of 32 elements
//
// Source: ggml's dequantize_row_q8_0 (github.com/ggml-org/llama.cpp).
#pragma once
#include "gpu.hpp"

namespace q8_0 {

struct Weight {
  struct Ahead {};
  struct Raw {
    unsigned low, high, scale;  // scale: the bits of a float16
  };
  struct Raw4 {
    unsigned codes, scale;
  };
  const unsigned char* data;
  const unsigned short* scales;

  GPU_FN unsigned scale_of(long origin, unsigned offset) const { return scales[(origin + (long)offset) >> 5]; }
  GPU_FN Ahead look(long, unsigned) const { return {}; }
  GPU_FN Raw fetch(long origin, unsigned offset, int, Ahead) const {
    const unsigned* words = (const unsigned*)(data + origin + (unsigned long)offset);
    return Raw{words[0], words[1], scale_of(origin, offset)};
  }
  GPU_FN static void arrive(Raw& raw) {
    raw.low = gpu::optimization_barrier(raw.low);
    raw.high = gpu::optimization_barrier(raw.high);
    raw.scale = gpu::optimization_barrier(raw.scale);
  }
  GPU_FN Raw4 fetch4(long origin, unsigned offset) const {
    return Raw4{*(const unsigned*)(data + origin + (unsigned long)offset), scale_of(origin, offset)};
  }
  template <class R> GPU_FN float scale(const R& raw) const {
    return (float)__builtin_bit_cast(gpu::half, (unsigned short)raw.scale);
  }
  GPU_FN static float code(unsigned codes, int i) { return (float)(signed char)(codes >> (8 * i)); }
  GPU_FN float value(const Raw& raw, int i) const { return code(i < 4 ? raw.low : raw.high, i % 4); }
  GPU_FN float value(const Raw4& raw, int i) const { return code(raw.codes, i); }
};

}  // namespace q8_0

#define Q8_0_PARAMETERS const unsigned char *codes, const unsigned short *scales
#define Q8_0_WEIGHT \
  q8_0::Weight { codes, scales }
