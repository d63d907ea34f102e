// The functions that all HIP kernels are written with, for AMD GPUs (clang or hiprtc) and for the CPU.
//
// On a GPU each of them is one instruction or a few. With GPU_HOST defined (tests), the same kernels compile for
// the CPU: gpu_host.hpp then supplies work-items, waves, barriers, shuffles and matrix instructions.
//   extern "C" GPU_KERNEL(threads) void name(args...)   a kernel; arguments: pointers and 32- or 64-bit numbers
//   GPU_FN                                              a device function (always inlined)
//   GPU_SHARED(type, name, count)                       `count` elements of LDS, the same for the whole work-group
//   GPU_WAVES_PER_SIMD(count)                           bounds a kernel's registers: a SIMD holds this many waves
//   GPU_WAVE                                            lanes of a wave: 64 on gfx9 (CDNA), 32 on gfx11 and later
//   GPU_CDNA, GPU_RDNA3, GPU_RDNA4                      1 or 0: which matrix instructions there are
//   GPU_CDNA4                                           1 or 0: those of CDNA of twice the depth, too (never on the CPU)
// Work-groups are one-dimensional.
#pragma once

#if defined(GPU_HOST)
#include "gpu_host.hpp"
#else
#include "gpu_device.hpp"
#endif

namespace gpu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// ---- numbers ---------------------------------------------------------------------------------------------------
// bfloat16 is the upper half of a float32. Rounding: RTNE to nearest, ties to even; RTNA to nearest, ties away from
// zero; RTZ towards zero.
enum class Round { RTNE, RTNA, RTZ };

GPU_FN float bits_to_float(u32 bits) { return __builtin_bit_cast(float, bits); }
GPU_FN u32 float_to_bits(float x) { return __builtin_bit_cast(u32, x); }

// Rounded twice, as other programs do, where the compiler would make one fused operation of it.
GPU_FN float multiply_then_add(float a, float b, float c) {
#pragma clang fp contract(off)
  return a * b + c;
}

template <Round MODE = Round::RTNE>
GPU_FN u16 float_to_bf16_bits(float x) {
  u32 bits = float_to_bits(x);
  if (MODE == Round::RTZ) return u16(bits >> 16);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return u16((bits >> 16) | 0x40u);  // a NaN stays one
  if (MODE == Round::RTNA) return u16((bits + 0x8000u) >> 16);
  return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct bf16 {
  u16 bits;
};

GPU_FN float to_float(float x) { return x; }
GPU_FN float to_float(half x) { return float(x); }
GPU_FN float to_float(bf16 x) { return bits_to_float(u32(x.bits) << 16); }

template <class T>
struct From;
template <>
struct From<float> {
  GPU_FN static float of(float x) { return x; }
};
template <>
struct From<half> {
  GPU_FN static half of(float x) { return half(x); }
};
template <>
struct From<bf16> {
  GPU_FN static bf16 of(float x) { return bf16{float_to_bf16_bits(x)}; }
};
template <class T>
GPU_FN T from_float(float x) {
  return From<T>::of(x);
}

// ---- arithmetic ------------------------------------------------------------------------------------------------
GPU_FN float exp(float x) { return __builtin_elementwise_exp(x); }
GPU_FN float exp2(float x) { return __builtin_elementwise_exp2(x); }
GPU_FN float log(float x) { return __builtin_elementwise_log(x); }
GPU_FN float sqrt(float x) { return __builtin_elementwise_sqrt(x); }
GPU_FN float abs(float x) { return __builtin_elementwise_abs(x); }
GPU_FN float fma(float a, float b, float c) { return __builtin_elementwise_fma(a, b, c); }
template <class T>
GPU_FN T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
GPU_FN T max(T a, T b) {
  return a > b ? a : b;
}
GPU_FN bool is_finite(float x) { return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u; }
GPU_FN u32 mul_high(u32 a, u32 b) { return u32((u64(a) * b) >> 32); }

// ---- memory ----------------------------------------------------------------------------------------------------
// One 128-bit access; the address must be a multiple of 16.
template <class V = u32x4, class T>
GPU_FN V load16(const T* p) {
  static_assert(sizeof(V) == 16, "load16 gives 16 bytes");
  GPU_CHECK_ALIGNED(p, 16);
  return *reinterpret_cast<const GPU_WHOLE V*>(p);
}
template <class V, class T>
GPU_FN void store16(T* p, V value) {
  static_assert(sizeof(V) == 16, "store16 takes 16 bytes");
  GPU_CHECK_ALIGNED(p, 16);
  *reinterpret_cast<GPU_WHOLE V*>(p) = value;
}
// N elements of one access; N * sizeof(T) is a power of two.
template <int N, class T>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
// Eight neighbors, in float32.
struct Eight {
  float at[8];
};

// ---- the wave --------------------------------------------------------------------------------------------------
template <class T>
GPU_FN T shuffle_xor(T x, u32 mask) {
  return shuffle(x, lane() ^ mask);
}
// Reductions: every lane gets the result, in a fixed order: pairs, fours, eights, rows of 16, then the rows. All lanes
// must call them. `combine` is commutative.
template <u32 LANES = 16, class T, class F>
GPU_FN T row_reduce(T x, F combine) {
  static_assert(LANES == 2 || LANES == 4 || LANES == 8 || LANES == 16, "lanes of a row of 16");
  x = combine(x, partner<1>(x));
  if constexpr (LANES > 2) x = combine(x, partner<2>(x));
  if constexpr (LANES > 4) x = combine(x, partner<4>(x));
  if constexpr (LANES > 8) x = combine(x, partner<8>(x));
  return x;
}
template <class T, class F>
GPU_FN T wave_reduce(T x, F combine) {
  x = row_reduce(x, combine);
  T lower = combine(lane_value(x, 0), lane_value(x, 16));
  if constexpr (GPU_WAVE == 32) return lower;
  return combine(lower, combine(lane_value(x, 32), lane_value(x, 48)));
}
struct Sum {
  GPU_FN float operator()(float a, float b) const { return a + b; }
};
struct Max {
  template <class T>
  GPU_FN T operator()(T a, T b) const {
    return max(a, b);
  }
};
GPU_FN float wave_sum(float x) { return wave_reduce(x, Sum{}); }
GPU_FN float wave_max(float x) { return wave_reduce(x, Max{}); }

// ---- the work-group: `memory` has a place for each wave of it; every work-item gets the result -------------------
template <u32 THREADS>
GPU_FN float block_sum(float x, float* memory) {
  x = wave_sum(x);
  barrier();  // an earlier use of `memory` is over
  if (lane() == 0) memory[wave()] = x;
  barrier();
  x = 0.f;
  for (u32 i = 0; i < THREADS / GPU_WAVE; i++) x += memory[i];
  return x;
}
template <u32 THREADS>
GPU_FN float block_max(float x, float* memory) {
  x = wave_max(x);
  barrier();
  if (lane() == 0) memory[wave()] = x;
  barrier();
  x = memory[0];
  for (u32 i = 1; i < THREADS / GPU_WAVE; i++) x = max(x, memory[i]);
  return x;
}

}  // namespace gpu
