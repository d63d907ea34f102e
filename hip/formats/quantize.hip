// NF4 by blocks: absmax of each, code = number of thresholds below x (1 / absmax) (a tie takes the lower code), element
// 2j in the high nibble of byte j; value for value what bitsandbytes makes. Double quantization: offset = mean of
// absmax, then 8-bit codes of absmax - offset by blocks of 256 over thresholds [255].
//   x [n], y [n] f32, f16 or bf16 (type); packed u8 [ceil(n / 2)]; absmax f32 [blocks] (u8 codes when nested);
//   nested_absmax f32 [ceil(blocks / 256)], nested_code f32 [256], offset f32 [1].
// block: a power of two from 32. Launch: quantize ceil(n / (4096 runs)) work-groups of 256 with runs = max(1, block /
// 4096), 16 runs elements per work-item; mean one of 256; nest ceil(blocks / 256) of 256; dequantize ceil(n / 4096) of
// 256.
// Sources: Dettmers et al., QLoRA (2023), section 3; Dettmers et al., 8-bit Optimizers (2022), section 2.2.
#include "elements.hpp"
#include "eights_formats.hpp"
#include "weight_formats.hpp"

using namespace gpu;

constexpr float SMALLEST = 1e-38f;  // a block of zeros gets code 7

// Sixteen codes, element 2j in the high nibble of byte j.
GPU_FN u32x2 nf4_codes(const Eight& low, const Eight& high, float scale) {
  u32x2 words = {0, 0};
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    words[0] |= nf4::code(low.at[e] * scale) << (4 * (e ^ 1));
    words[1] |= nf4::code(high.at[e] * scale) << (4 * (e ^ 1));
  }
  return words;
}
GPU_FN Eight load8_or_zeros(const void* x, u32 type, u64 i, u64 n) {
  return i < n ? load8(x, type, i, n) : eight_zeros();
}
GPU_FN float peak_of(const Eight& v, float peak) {
#pragma unroll
  for (u32 e = 0; e < 8; e++) peak = max(peak, gpu::abs(v.at[e]));
  return peak;
}

extern "C" GPU_KERNEL(256) void nf4_quantize(const void* x, u8* packed, float* absmax, u64 n, u32 block, u32 type) {
  GPU_SHARED(float, peaks, 16);
  u32 runs = max(1u, block / 4096), share = block / (16 * runs);  // work-items of a block: 2 to 256
  u64 first = (u64(block_x()) * 256 + thread()) * 16 * runs;
  float peak = 0.f;
  for (u32 r = 0; r < runs; r++) {
    peak = peak_of(load8_or_zeros(x, type, first + 16 * r, n), peak);
    peak = peak_of(load8_or_zeros(x, type, first + 16 * r + 8, n), peak);
  }
  peak = max(peak, partner<1>(peak));
  if (share > 2) peak = max(peak, partner<2>(peak));
  if (share > 4) peak = max(peak, partner<4>(peak));
  if (share > 8) peak = max(peak, partner<8>(peak));
  if (share > 16) {  // more than a row of lanes
    peaks[thread() / 16] = peak;
    barrier();
    u32 own = thread() / share * share / 16;
    for (u32 i = own; i < own + share / 16; i++) peak = max(peak, peaks[i]);
  }
  if (first >= n) return;
  if (thread() % share == 0) absmax[first >> __builtin_ctz(block)] = peak;
  float scale = 1.f / max(peak, SMALLEST);
  for (u32 r = 0; r < runs; r++) {
    u64 at = first + 16 * r;
    if (at >= n) return;
    u32x2 words = nf4_codes(load8(x, type, at, n), load8_or_zeros(x, type, at + 8, n), scale);
    if (at + 16 <= n) {
      *reinterpret_cast<u32x2*>(packed + at / 2) = words;
    } else {
      for (u64 i = at; i < n; i += 2) packed[i / 2] = u8(words[(i - at) / 8] >> (4 * ((i - at) % 8)));
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
  if (thread() < 16) level[thread()] = nf4::level(thread());
  barrier();
  u64 i = (u64(block_x()) * 256 + thread()) * 16;
  if (i >= n) return;
  u64 at = i >> __builtin_ctz(block);  // a block holds a multiple of 16 elements
  float scale = nested_absmax ? multiply_then_add(nested_code[as<u8>(absmax)[at]],
                                                  nested_absmax[u32(at) / nested_block], offset[0])
                              : as<float>(absmax)[at];
  u32x2 words = {0, 0};
  if (i + 16 <= n) {
    words = *reinterpret_cast<const u32x2*>(packed + i / 2);
  } else {
    for (u64 e = i; e < n; e += 2) words[(e - i) / 8] |= u32(packed[e / 2]) << (4 * ((e - i) % 8));
  }
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    Eight v;
#pragma unroll
    for (u32 e = 0; e < 8; e++) v.at[e] = level[words[half] >> (4 * (e ^ 1)) & 15] * scale;
    if (i + 8 * half < n) store8(y, type, i + 8 * half, n, v);
  }
}

// A whole weight of the other formats: y [n] = its elements, n a multiple of 8. Launch: as nf4_dequantize.
template <class Row> GPU_FN void dequantize(const Row& w, void* y, u64 n, u32 type) {
  u64 first = (u64(block_x()) * 256 + thread()) * 16;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u64 i = first + 8 * half;
    Eight v = w.fetch(i < n ? i : 0, 8);  // every lane takes part
    if (i < n) store8(y, type, i, n, v);
  }
}
#define DEQUANTIZE(format, TAG, ROW)                                                                                  \
  extern "C" GPU_KERNEL(256) void format##_dequantize(TAG##_PARAMETERS, void* y, u64 n, u32 type) {                   \
    dequantize(ROW<decltype(TAG##_WEIGHT)>{TAG##_WEIGHT}, y, n, type);                                                \
  }
#define WHOLE(format, TAG) DEQUANTIZE(format, TAG, WeightRow)
#define EIGHTS(format, TAG) DEQUANTIZE(format, TAG, EightsRow)
WHOLE_UNIT_FORMATS(WHOLE)
EIGHTS_FORMATS(EIGHTS)
