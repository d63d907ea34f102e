// Element access of memory-bound kernels. The element type (f32, f16, bf16) is a run-time argument: the branch is
// uniform and costs a scalar instruction. Arithmetic is in float32.
// A kernel's argument `types` holds four bits for each array, in the order of its arguments.
#pragma once

#include "gpu.hpp"

namespace gpu {

constexpr u32 F32 = 0, F16 = 1, BF16 = 2;

GPU_FN u32 type_of(u32 types, u32 index) { return types >> (4 * index) & 15; }

template <class T>
GPU_FN const T* as(const void* p) {
  return static_cast<const T*>(p);
}
template <class T>
GPU_FN T* as(void* p) {
  return static_cast<T*>(p);
}

GPU_FN float load(const void* p, u32 type, u64 i) {
  if (type == F32) return as<float>(p)[i];
  if (type == F16) return to_float(as<half>(p)[i]);
  return to_float(as<bf16>(p)[i]);
}
GPU_FN void store(void* p, u32 type, u64 i, float x) {
  if (type == F32) {
    as<float>(p)[i] = x;
  } else if (type == F16) {
    as<half>(p)[i] = from_float<half>(x);
  } else {
    as<bf16>(p)[i] = from_float<bf16>(x);
  }
}

// Eight neighbors; those from `end` on read as 0 and are not written.
GPU_FN Eight eight_zeros() { return {{0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}}; }
template <class T>
GPU_FN Eight widen(const T* p) {
  Eight v;
  constexpr int N = 16 / sizeof(T);
#pragma unroll
  for (int part = 0; part < 8 / N; part++) {
    Pack<N, T> loaded = __builtin_bit_cast(Pack<N, T>, load16(p + part * N));
#pragma unroll
    for (int i = 0; i < N; i++) v.at[part * N + i] = to_float(loaded.at[i]);
  }
  return v;
}
template <class T>
GPU_FN void narrow(T* p, const Eight& v) {
  constexpr int N = 16 / sizeof(T);
#pragma unroll
  for (int part = 0; part < 8 / N; part++) {
    Pack<N, T> made;
#pragma unroll
    for (int i = 0; i < N; i++) made.at[i] = from_float<T>(v.at[part * N + i]);
    store16(p + part * N, __builtin_bit_cast(u32x4, made));
  }
}
// Element by element, without branches: an index past the end becomes that of the last element.
template <class T>
GPU_FN Eight widen_some(const T* p, u64 count) {
  Eight v;
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    float x = to_float(p[e < count ? e : count - 1]);
    v.at[e] = e < count ? x : 0.f;
  }
  return v;
}
template <class T>
GPU_FN void narrow_some(T* p, const Eight& v, u64 count) {
#pragma unroll
  for (u32 e = 0; e < 8; e++)
    if (e < count) p[e] = from_float<T>(v.at[e]);
}
template <class T>
GPU_FN Eight load8_of(const T* p, u64 i, u64 end, bool aligned) {
  return aligned && i + 8 <= end ? widen(p + i) : widen_some(p + i, end - i);
}
template <class T>
GPU_FN void store8_of(T* p, u64 i, u64 end, const Eight& v, bool aligned) {
  if (aligned && i + 8 <= end) {
    narrow(p + i, v);
  } else {
    narrow_some(p + i, v, end - i);
  }
}
// `aligned`: the elements start at a multiple of 8 of an aligned array (128-bit accesses). i is less than `end`.
GPU_FN Eight load8(const void* p, u32 type, u64 i, u64 end, bool aligned = true) {
  if (type == F32) return load8_of(as<float>(p), i, end, aligned);
  if (type == F16) return load8_of(as<half>(p), i, end, aligned);
  return load8_of(as<bf16>(p), i, end, aligned);
}
GPU_FN void store8(void* p, u32 type, u64 i, u64 end, const Eight& v, bool aligned = true) {
  if (type == F32) {
    store8_of(as<float>(p), i, end, v, aligned);
  } else if (type == F16) {
    store8_of(as<half>(p), i, end, v, aligned);
  } else {
    store8_of(as<bf16>(p), i, end, v, aligned);
  }
}

}  // namespace gpu
