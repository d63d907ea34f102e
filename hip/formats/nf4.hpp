// NF4, a format of frozen weights (weight_formats.hpp): 4-bit codes of 16 levels, one scale for a block of elements.
//
//     element = scale of its block * level of its code; element 2j is the high nibble of byte j (bitsandbytes' layout)
//     NESTED (double quantization): scale = nested_code[absmax] * nested_absmax + nested_offset, absmax 8 bits,
//     nested_absmax one for 2^nested_shift blocks
//
// Blocks are 2^block_shift elements, a multiple of 8, as are rows; a weight has fewer than 2^32 elements.
// Source: Dettmers et al., QLoRA (2023), section 3 and appendix E.
#pragma once
#include "gpu.hpp"

namespace nf4 {

#define NF4_LEVELS                                                                                                    \
  {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,                   \
   -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,                    \
   0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}

// The number of thresholds below v: a tie takes the lower code.
GPU_FN unsigned code(float v) {
  constexpr float levels[16] = NF4_LEVELS;
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 15; ++i) found += v > (levels[i] + levels[i + 1]) / 2.0f ? 1u : 0u;
  return found;
}

// The level of code % 16, by selects: a table in the code object would first have to be loaded.
GPU_FN float level(unsigned code) {
  constexpr float levels[16] = NF4_LEVELS;
  float found = levels[0];
#pragma unroll
  for (unsigned i = 1; i < 16; ++i) found = (code & 15u) == i ? levels[i] : found;
  return found;
}

// A 32-bit offset: one register per lane, and a base address shared by all. Tables are smaller than 4 GiB.
GPU_FN float float_at(const float* p, unsigned i) { return *(const float*)((const char*)p + (unsigned long)(4u * i)); }

template <bool NESTED> struct Weight {
  struct Ahead {  // of a nested scale: where in nested_code, and its own scale
    unsigned index;
    float nested;
  };
  struct Raw {
    unsigned codes;
    float absmax, nested;  // NESTED: the entry of nested_code, and its scale
  };
  struct Raw4 {
    unsigned short codes;
    unsigned char index;
    float scale;
  };
  const unsigned char* data;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_code;
  float nested_offset, table;  // table: level(lane % 16)
  int block_shift, nested_shift;

  GPU_FN unsigned block(long origin, unsigned offset) const { return ((unsigned)origin + offset) >> block_shift; }
  GPU_FN Ahead look(long origin, unsigned offset) const {
    Ahead ahead{};
    if (NESTED) {
      const unsigned i = block(origin, offset);
      ahead.index = ((const unsigned char*)absmax)[(unsigned long)i];
      ahead.nested = float_at(nested_absmax, i >> nested_shift);
    }
    return ahead;
  }
  GPU_FN Raw fetch(long origin, unsigned offset, int, Ahead ahead) const {
    Raw raw{};
    if (NESTED) {  // or it is waited for a tile early, to be scaled
      ahead.index = gpu::optimization_barrier(ahead.index);
      ahead.nested = gpu::optimization_barrier(ahead.nested);
    }
    raw.codes = *(const unsigned*)(data + origin / 2 + (unsigned long)(offset / 2));
    raw.absmax = NESTED ? float_at(nested_code, ahead.index) : float_at((const float*)absmax, block(origin, offset));
    raw.nested = ahead.nested;
    return raw;
  }
  GPU_FN static void arrive(Raw& raw) {
    raw.codes = gpu::optimization_barrier(raw.codes);
    raw.absmax = gpu::optimization_barrier(raw.absmax);
  }
  GPU_FN float scale(const Raw& raw) const {
    return NESTED ? gpu::multiply_then_add(raw.absmax, raw.nested, nested_offset) : raw.absmax;
  }
  GPU_FN Raw4 fetch4(long origin, unsigned offset) const {
    Raw4 raw{};
    raw.codes = *(const unsigned short*)(data + origin / 2 + (unsigned long)(offset / 2));
    const long block = (origin + (long)offset) >> block_shift;
    if (NESTED) raw.index = ((const unsigned char*)absmax)[block], raw.scale = nested_absmax[block >> nested_shift];
    else raw.scale = ((const float*)absmax)[block];
    return raw;
  }
  GPU_FN float scale(const Raw4& raw) const {
    return NESTED ? nested_code[raw.index] * raw.scale + nested_offset : raw.scale;
  }
  template <class R> GPU_FN float value(const R& raw, int i) const {
    return gpu::lookup16(table, raw.codes, 4 * (i ^ 1));
  }
};

}  // namespace nf4

#define NF4_PARAMETERS                                                                                                \
  const unsigned char *packed, const void *absmax, const float *nested_absmax, const float *nested_code,              \
      const float *nested_offset, int block_shift, int nested_shift
#define NF4_OF(NESTED)                                                                                                \
  nf4::Weight<NESTED> {                                                                                               \
    packed, absmax, nested_absmax, nested_code, NESTED ? *nested_offset : 0.0f, nf4::level(gpu::lane()),        \
        block_shift, nested_shift                                                                                     \
  }
#define NF4_WEIGHT NF4_OF(false)
#define NF4_NESTED_PARAMETERS NF4_PARAMETERS
#define NF4_NESTED_WEIGHT NF4_OF(true)
