// NF4 by blocks: absmax of each, code = number of thresholds below x (1 / absmax) (a tie takes the lower code), element 2j
// in the high nibble of byte j; value for value what bitsandbytes makes. Double quantisation: offset = mean of absmax,
// then 8-bit codes of absmax - offset by blocks of 256 over thresholds [255].
//   x [n], y [n] f32, f16 or bf16 (type); packed u8 [ceil(n / 2)]; absmax f32 [blocks] (u8 codes when nested);
//   nested_absmax f32 [ceil(blocks / 256)], nested_code f32 [256], offset f32 [1].
// Launch: quantize ceil(n / (2048 words)) work-groups of 256 with words = max(1, block / 2048), 8 words elements a
// work-item; mean one of 256; nest ceil(blocks / 256) of 256; dequantize ceil(n / 2048) of 256.
// Sources: Dettmers et al., QLoRA (2023), section 3; Dettmers et al., 8-bit Optimizers (2022), section 2.2.
#include "elements.hpp"

using namespace gpu;

#define NF4_LEVELS                                                                                                    \
  {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,                   \
   -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,                    \
   0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}
constexpr float SMALLEST = 1e-38f;  // a block of zeros gets code 7

GPU_FN u32 nf4_code(float v) {
  constexpr float level[16] = NF4_LEVELS;
  u32 code = 0;
#pragma unroll
  for (u32 i = 0; i < 15; i++) code += v > (level[i] + level[i + 1]) / 2.f ? 1u : 0u;
  return code;
}

// By selection: a table in the code object would have to be found and read first.
GPU_FN float nf4_level(u32 code) {
  constexpr float level[16] = NF4_LEVELS;
  float found = level[0];
#pragma unroll
  for (u32 i = 1; i < 16; i++) found = code == i ? level[i] : found;
  return found;
}

GPU_FN float peak_of(const Eight& v, float peak) {
#pragma unroll
  for (u32 e = 0; e < 8; e++) peak = max(peak, gpu::abs(v.at[e]));
  return peak;
}

extern "C" GPU_KERNEL(256) void nf4_quantize(const void* x, u8* packed, float* absmax, u64 n, u32 block, u32 type) {
  GPU_SHARED(float, peaks, 256);
  u32 words = max(1u, block / 2048), share = block / (8 * words);  // work-items of a block
  u64 first = (u64(block_x()) * 256 + thread()) * 8 * words;
  float peak = 0.f;
  for (u32 w = 0; w < words; w++) peak = peak_of(load8(x, type, first + 8 * w, n), peak);
  peaks[thread()] = peak;
  barrier();
  for (u32 width = share / 2; width > 0; width /= 2) {
    float other = thread() % share < width ? peaks[thread() + width] : 0.f;
    barrier();
    peaks[thread()] = max(peaks[thread()], other);
    barrier();
  }
  peak = peaks[thread() / share * share];
  if (first >= n) return;
  if (thread() % share == 0) absmax[first / block] = peak;
  float scale = 1.f / max(peak, SMALLEST);
  for (u32 w = 0; w < words; w++) {
    u64 at = first + 8 * w;
    Eight v = load8(x, type, at, n);
    u32 word = 0;
#pragma unroll
    for (u32 e = 0; e < 8; e++) word |= nf4_code(v.at[e] * scale) << (4 * (e ^ 1));
    if (at + 8 <= n) {
      *as<u32>(packed + at / 2) = word;
    } else {
      for (u64 i = at; i < n; i += 2) packed[i / 2] = u8(word >> (4 * (i - at)));
    }
  }
}

extern "C" GPU_KERNEL(256) void nf4_mean(const float* absmax, float* offset, u32 blocks) {
  GPU_SHARED(double, sums, 256);
  double sum = 0;
  for (u32 i = thread(); i < blocks; i += 256) sum += double(absmax[i]);
  sums[thread()] = sum;
  barrier();
  if (thread() != 0) return;
  for (u32 i = 1; i < 256; i++) sum += sums[i];
  offset[0] = float(sum / double(blocks));
}

extern "C" GPU_KERNEL(256) void nf4_nest(const float* absmax, const float* offset, const float* thresholds, u8* codes,
                                         float* nested_absmax, u32 blocks) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  u32 i = block_x() * 256 + thread();
  float d = i < blocks ? absmax[i] - offset[0] : 0.f;
  float peak = block_max<256>(gpu::abs(d), memory);
  if (thread() == 0) nested_absmax[block_x()] = peak;
  if (i >= blocks) return;
  float v = d * (1.f / max(peak, SMALLEST));
  u32 low = 0;
  for (u32 step = 128; step > 0; step /= 2)
    if (v > thresholds[low + step - 1]) low += step;
  codes[i] = u8(low);
}

extern "C" GPU_KERNEL(256) void nf4_dequantize(const u8* packed, const void* absmax, const float* nested_absmax,
                                               const float* nested_code, const float* offset, void* y, u64 n,
                                               u32 block, u32 nested_block, u32 type) {
  GPU_SHARED(float, level, 16);
  if (thread() < 16) level[thread()] = nf4_level(thread());
  barrier();
  u64 i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= n) return;
  u64 at = i / block;  // a block holds a multiple of 8 elements
  float scale = nested_absmax ? nested_code[as<u8>(absmax)[at]] * nested_absmax[at / nested_block] + offset[0]
                              : as<float>(absmax)[at];
  u32 word = 0;
  if (i + 8 <= n) {
    word = *as<u32>(packed + i / 2);
  } else {
    for (u64 e = i; e < n; e += 2) word |= u32(packed[e / 2]) << (4 * (e - i));
  }
  Eight v;
#pragma unroll
  for (u32 e = 0; e < 8; e++) v.at[e] = level[word >> (4 * (e ^ 1)) & 15] * scale;
  store8(y, type, i, n, v);
}
