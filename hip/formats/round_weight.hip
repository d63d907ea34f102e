// A weight of full precision rounded to a format of GGUF, bit for bit as llama-quantize does.
//   x f32 [n]; codes, scales, high and d as in device/formats. Sums are of float32, from the first element to the last.
// Launch: work-groups of 256; a work-item has 4 elements of Q4_0, Q5_0 and Q8_0, 32 of Q4_K, 16 of Q6_K.
// Source: ggml-quants.c (github.com/ggml-org/llama.cpp), quantize_row_*_ref.
#include "gpu.hpp"

#pragma clang fp contract(off)

using namespace gpu;

GPU_FN u16 half_bits(float x) { return __builtin_bit_cast(u16, half(x)); }
GPU_FN float half_value(u16 bits) { return float(__builtin_bit_cast(half, bits)); }
GPU_FN float round_even(float x) { return __builtin_elementwise_roundeven(x); }
GPU_FN float clamped(float x, float low, float high) { return min(max(x, low), high); }
struct Either {
  GPU_FN u32 operator()(u32 a, u32 b) const { return a | b; }
};
struct Least {
  GPU_FN u32 operator()(u32 a, u32 b) const { return min(a, b); }
};

// The element of largest magnitude among the N elements of each of LANES neighboring lanes; of equal ones the first.
template <u32 LANES, u32 N>
GPU_FN float furthest(const float (&x)[N]) {
  float most = 0.f;
#pragma unroll
  for (u32 e = 0; e < N; e++) most = max(most, gpu::abs(x[e]));
  if constexpr (LANES > 1) most = row_reduce<LANES>(most, Max{});
  u32 first = 2 * LANES * N;  // its place, and its sign
#pragma unroll
  for (u32 e = N; e-- > 0;)
    if (gpu::abs(x[e]) == most) first = 2 * (thread() % LANES * N + e) + (float_to_bits(x[e]) >> 31);
  if constexpr (LANES > 1) first = row_reduce<LANES>(first, Least{});
  return first % 2 ? -most : most;
}

// N elements of work-item `group`; zeros where there are none.
template <u32 N>
GPU_FN void fetch(float (&to)[N], const float* x, u64 group, u64 n) {
#pragma unroll
  for (u32 e = 0; e < N; e += 4) {
    f32x4 four = {0.f, 0.f, 0.f, 0.f};
    if (group * N < n) four = load16<f32x4>(x + group * N + e);
#pragma unroll
    for (u32 i = 0; i < 4; i++) to[e + i] = four[i];
  }
}
GPU_FN u64 own_group() { return u64(block_x()) * 256 + thread(); }

// ---- blocks of 32 with one scale ------------------------------------------------------------------------------------
template <u32 BITS>
GPU_FN void round_block(const float* x, void* codes, u16* scales, u32* high, u64 n) {
  u64 group = own_group();
  float at[4];
  fetch(at, x, group, n);
  constexpr float MIDDLE = float(1 << (BITS - 1));
  float largest = furthest<8>(at), scale = BITS == 8 ? gpu::abs(largest) / 127.f : largest * (-1.f / MIDDLE);
  float inverse = scale != 0.f ? 1.f / scale : 0.f;
  u32 low = 0, fifth = 0;
#pragma unroll
  for (u32 e = 0; e < 4; e++) {
    float scaled = at[e] * inverse;
    if (BITS == 8) {  // halves go away from 0
      int whole = int(clamped(scaled, -128.f, 127.f));
      low |= u32(whole + int(2.f * (scaled - float(whole))) & 255) << (8 * e);
    } else {
      u32 code = u32(clamped(scaled + (MIDDLE + 0.5f), 0.f, 2.f * MIDDLE - 1.f));
      low |= (code & 15) << (4 * e);
      fifth |= code >> 4 << (4 * (thread() % 8) + e);
    }
  }
  if (BITS == 5) fifth = row_reduce<8>(fifth, Either{});
  if (group * 4 >= n) return;
  if (BITS == 8) {
    static_cast<u32*>(codes)[group] = low;
  } else {
    static_cast<u16*>(codes)[group] = u16(low);
  }
  if (thread() % 8 != 0) return;
  scales[group / 8] = half_bits(scale);
  if (BITS == 5) high[group / 8] = fifth;
}
extern "C" GPU_KERNEL(256) void round_q4_0(const float* x, u16* codes, u16* scales, u64 n) {
  round_block<4>(x, codes, scales, nullptr, n);
}
extern "C" GPU_KERNEL(256) void round_q5_0(const float* x, u16* codes, u16* scales, u32* high, u64 n) {
  round_block<5>(x, codes, scales, high, n);
}
extern "C" GPU_KERNEL(256) void round_q8_0(const float* x, u32* codes, u16* scales, u64 n) {
  round_block<8>(x, codes, scales, nullptr, n);
}

// ---- Q4_K: of 32 elements 21 candidates for scale and minimum; eight of them in multiples of one unit ---------------
GPU_FN float q4_k_code(float x, float least, float inverse) {
  return clamped(round_even(inverse * (x - least)), 0.f, 15.f);
}
// An element's contribution to the weighted sum of squared errors.
GPU_FN float q4_k_cost(float x, float weight, float code, float scale, float least) {
  float off = scale * code + least - x;
  return weight * (off * off);
}
// value / largest in sixty-thirds, converted to a byte as C does and limited to 63.
GPU_FN u32 q4_k_field(float largest, float value) {
  return largest <= 0.f ? 0 : min(u32(int(round_even(63.f / largest * value))) & 255, 63u);
}

struct Range {
  float scale, least;              // of the group
  float code_least, code_inverse;  // of its codes
};
GPU_FN Range q4_k_range(const float (&x)[32]) {
  float squares = 0.f, least = 0.f, most = x[0];
#pragma unroll
  for (u32 e = 0; e < 32; e++) {
    squares += x[e] * x[e];
    least = min(least, x[e]);
    most = max(most, x[e]);
  }
  if (most == least) return {0.f, least, least, 0.f};
  float mean = gpu::sqrt(squares * 0.03125f), inverse = 15.f / (most - least);
  Range chosen = {1.f / inverse, least, least, inverse};
  float sum_w = 0.f, sum_x = 0.f, best = 0.f;
#pragma unroll
  for (u32 e = 0; e < 32; e++) {
    float weight = mean + gpu::abs(x[e]);
    sum_w += weight;
    sum_x += weight * x[e];
    best += q4_k_cost(x[e], weight, q4_k_code(x[e], least, inverse), chosen.scale, least);
  }
#pragma unroll 1
  for (u32 number = 0; number <= 20; number++) {
    float from = chosen.least, sum_l = 0.f, sum_l2 = 0.f, sum_xl = 0.f;
    inverse = (-1.f + 0.1f * float(number) + 15.f) / (most - from);  // the range begins at the best minimum so far
#pragma unroll
    for (u32 e = 0; e < 32; e++) {
      float code = q4_k_code(x[e], from, inverse), weighted = (mean + gpu::abs(x[e])) * code;
      sum_l += weighted;
      sum_l2 += weighted * code;
      sum_xl += weighted * x[e];
    }
    float determinant = sum_w * sum_l2 - sum_l * sum_l;
    if (!(determinant > 0.f)) continue;
    float scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    float to = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    if (to > 0.f) scale = sum_xl / sum_l2, to = 0.f;
    float found = 0.f;
#pragma unroll
    for (u32 e = 0; e < 32; e++)
      found += q4_k_cost(x[e], mean + gpu::abs(x[e]), q4_k_code(x[e], from, inverse), scale, to);
    if (found < best) {
      best = found;
      chosen = {scale, to, from, inverse};
    }
  }
  return chosen;
}

extern "C" GPU_KERNEL(256) void round_q4_k(const float* x, u32* codes, u32* scales, u64 n) {
  u64 group = own_group();
  float at[32];
  fetch(at, x, group, n);
  const Range range = q4_k_range(at);
  // The zero is the second argument: of 0 and -0 `max` returns the second.
  float top_scale = row_reduce<8>(max(range.scale, 0.f), Max{}), top_least = row_reduce<8>(max(-range.least, 0.f), Max{});
  u32 scale = q4_k_field(top_scale, range.scale), least = q4_k_field(top_least, -range.least), i = thread() % 8;
  u16 scale_unit = half_bits(top_scale / 63.f), least_unit = half_bits(top_least / 63.f);
  u32x4 of_block = {scale_unit | u32(least_unit) << 16, (scale & 15) << (4 * i), (least & 15) << (4 * i),
                    scale >> 4 << (2 * i) | least >> 4 << (2 * i + 16)};
#pragma unroll
  for (u32 word = 1; word < 4; word++) of_block[word] = row_reduce<8>(u32(of_block[word]), Either{});
  if (group * 32 >= n) return;
  float step = half_value(scale_unit) * float(scale), offset = half_value(least_unit) * float(least);
  u32x4 words = {0, 0, 0, 0};
#pragma unroll
  for (u32 e = 0; e < 32; e++) {
    float code = step != 0.f ? clamped(round_even((at[e] + offset) / step), 0.f, 15.f)
                             : q4_k_code(at[e], range.code_least, range.code_inverse);
    words[e / 8] |= u32(code) << (4 * (e % 8));
  }
  store16(codes + group * 4, words);
  if (i == 0) store16(scales + group / 8 * 4, of_block);
}

// ---- Q6_K: of 16 elements 19 candidates for a scale; sixteen of them in multiples of one unit -----------------------
constexpr float LEAST = 1e-15f;  // smaller groups are zeros

GPU_FN float q6_k_code(float x, float inverse) { return clamped(round_even(inverse * x), -32.f, 31.f); }

extern "C" GPU_KERNEL(256) void round_q6_k(const float* x, u32* codes, u32* high, u8* scales, u16* d, u64 n) {
  u64 group = own_group();
  float at[16];
  fetch(at, x, group, n);
  float largest = furthest<1>(at), scale = 0.f, chosen = 0.f, best = 0.f;
  bool some = gpu::abs(largest) >= LEAST;
#pragma unroll 1
  for (u32 number = 0; some && number <= 18; number++) {
    // Candidate 0 is the unscaled range; the others are in rising order.
    float step = number == 0 ? 0.f : number > 9 ? float(number) - 9.f : float(number) - 10.f;
    float inverse = -(32.f + 0.1f * step) / largest, sum_lx = 0.f, sum_l2 = 0.f;
#pragma unroll
    for (u32 e = 0; e < 16; e++) {
      float code = q6_k_code(at[e], inverse), weight = at[e] * at[e];
      sum_lx += weight * at[e] * code;
      sum_l2 += weight * code * code;
    }
    bool better = number == 0 ? sum_l2 != 0.f : sum_l2 > 0.f && sum_lx * sum_lx > best * sum_l2;
    if (better) {
      scale = sum_lx / sum_l2;
      best = scale * sum_lx;
    }
    if (better || number == 0) chosen = inverse;
  }
  float of_groups[1] = {scale};
  float top = furthest<16>(of_groups), unit = 0.f, field = 0.f;
  bool any = gpu::abs(top) >= LEAST;
  if (any) {
    float inverse = -128.f / top;
    unit = 1.f / inverse;
    field = min(round_even(inverse * scale), 127.f);
  }
  if (group * 16 >= n) return;
  float size = half_value(half_bits(unit)) * field;
  u32x2 low = {0, 0};
  u32 two_bits = 0;
#pragma unroll
  for (u32 e = 0; e < 16; e++) {
    float code = some ? q6_k_code(at[e], chosen) : -32.f;
    if (size != 0.f) code = clamped(round_even(at[e] / size), -32.f, 31.f);
    u32 made = any ? u32(code + 32.f) : 0;
    low[e / 8] |= (made & 15) << (4 * (e % 8));
    two_bits |= made >> 4 << (2 * e);
  }
  *reinterpret_cast<GPU_WHOLE u32x2*>(codes + group * 2) = low;
  high[group] = two_bits;
  scales[group] = u8(int(field));
  if (thread() % 16 == 0) d[group / 16] = half_bits(unit);
}
