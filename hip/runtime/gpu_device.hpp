// The GPU half of gpu.hpp: work-item numbers, barriers, shuffles and matrix instructions as compiler builtins.
// Needs no header of ROCm, so that plain clang compiles the kernels.
// Sources: LLVM, User Guide for AMDGPU Backend; AMD CDNA3 and RDNA3 instruction set references.
#pragma once

#if defined(__HIPCC_RTC__)
// hiprtc declares these in the global namespace before it reads a kernel file: ours get names of their own.
#define abs gpu_abs
#define exp gpu_exp
#define exp2 gpu_exp2
#define fma gpu_fma
#define half gpu_half
#define log gpu_log
#define max gpu_max
#define min gpu_min
#define sqrt gpu_sqrt
#endif

#define GPU_FN __attribute__((device, always_inline)) inline
#define GPU_KERNEL(threads) __attribute__((global, amdgpu_flat_work_group_size(threads, threads)))
#define GPU_SHARED(type, name, count) static __attribute__((shared, aligned(16))) type name[count]
// How many waves per SIMD must be able to hold: bounds the registers that the compiler may take.
#define GPU_WAVES_PER_SIMD(count) __attribute__((amdgpu_waves_per_eu(count)))
#define GPU_CHECK_ALIGNED(p, bytes)
#define GPU_WHOLE

#if defined(__GFX9__)
#define GPU_WAVE 64
#else
#define GPU_WAVE 32
#endif
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define GPU_CDNA 1
#else
#define GPU_CDNA 0
#endif
#if defined(__gfx950__)
#define GPU_CDNA4 1
#else
#define GPU_CDNA4 0
#endif
#if defined(__GFX11__)
#define GPU_RDNA3 1
#else
#define GPU_RDNA3 0
#endif
#if defined(__GFX12__)
#define GPU_RDNA4 1
#else
#define GPU_RDNA4 0
#endif

#include "gpu_types.hpp"

namespace gpu {

// ---- place -------------------------------------------------------------------------------------------------------
GPU_FN unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
GPU_FN unsigned lane() { return thread() & (GPU_WAVE - 1); }
// Uniform, and known to the compiler to be: it stays in a scalar register.
GPU_FN unsigned wave() { return __builtin_amdgcn_readfirstlane(thread() / GPU_WAVE); }
GPU_FN unsigned block_x() { return __builtin_amdgcn_workgroup_id_x(); }
GPU_FN unsigned block_y() { return __builtin_amdgcn_workgroup_id_y(); }
GPU_FN unsigned block_z() { return __builtin_amdgcn_workgroup_id_z(); }
// The first implicit arguments of a kernel (code object version 5) are the counts of work-groups.
GPU_FN unsigned grid_size(int axis) {
  return ((const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[axis];
}
GPU_FN unsigned grid_x() { return grid_size(0); }
GPU_FN unsigned grid_y() { return grid_size(1); }
GPU_FN unsigned grid_z() { return grid_size(2); }

// ---- halves of registers -----------------------------------------------------------------------------------------
// The low (or high) halves of a and b: a's in the low half of the result, b's in the high half.
GPU_FN unsigned low_halves(unsigned a, unsigned b) { return __builtin_amdgcn_perm(b, a, 0x05040100); }
GPU_FN unsigned high_halves(unsigned a, unsigned b) { return __builtin_amdgcn_perm(b, a, 0x07060302); }

// ---- order -------------------------------------------------------------------------------------------------------
GPU_FN void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// barrier() for LDS alone. On RDNA barrier() also waits for stores to global memory and invalidates the compute unit's
// cache, as the waves of a work-group may run on two compute units.
GPU_FN void local_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
// The same, and the compiler moves no access to memory across it. Loads in flight stay in flight.
GPU_FN void lds_barrier() {
#if defined(__GFX12__)
  asm volatile("s_wait_dscnt 0x0\n\ts_barrier_signal -1\n\ts_barrier_wait -1" ::: "memory");
#else
  asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
#endif
}
// Instructions are not moved across this one.
GPU_FN void sched_fence() { __builtin_amdgcn_sched_barrier(0); }
// An optimization barrier: to the compiler the result is a new value wherever this stands. So x is complete here (the
// wait for a load stays where its value is used), and what follows from it is recomputed instead of being kept in
// registers through a loop. x fits registers: a number or a vector.
template <class T>
GPU_FN T optimization_barrier(T x) {
  asm volatile("" : "+v"(x));
  return x;
}
// The same for what all lanes share, in a scalar register.
GPU_FN unsigned uniform_barrier(unsigned x) {
  x = __builtin_amdgcn_readfirstlane(x);
  asm volatile("" : "+s"(x));
  return x;
}

// ---- the wave ----------------------------------------------------------------------------------------------------
// The value that x has in lane `from`. T: 4 or 8 bytes.
template <class T>
GPU_FN T shuffle(T x, unsigned from) {
  static_assert(sizeof(T) % 4 == 0, "a lane hands over whole registers");
  struct Words {
    int at[sizeof(T) / 4];
  } words = __builtin_bit_cast(Words, x);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; i++) words.at[i] = __builtin_amdgcn_ds_bpermute(int(from) * 4, words.at[i]);
  return __builtin_bit_cast(T, words);
}
// Entry (codes >> at) % 16 of a table of which lane l holds entry l % 16.
GPU_FN float lookup16(float table, unsigned codes, int at) {
  // In bytes; of the bits above, the lane's number has only what does not matter.
  const unsigned address = at < 2 ? codes << (2 - at) & 60u : codes >> (at - 2);
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((int)address, __builtin_bit_cast(int, table)));
}
// The value of lane ^ 1 (STEP 1), lane ^ 2 (2), lane ^ 7 (4) or lane ^ 15 (8), by DPP: no access to LDS. The last two
// are lane ^ 4 and lane ^ 8 once the lanes of each 4 (8) agree, as they do in a reduction.
template <unsigned STEP, class T>
GPU_FN T partner(T x) {
  static_assert(STEP == 1 || STEP == 2 || STEP == 4 || STEP == 8, "lanes of a row of 16");
  static_assert(sizeof(T) % 4 == 0, "a lane hands over whole registers");
  constexpr int CONTROL = STEP == 1 ? 0xb1 : STEP == 2 ? 0x4e : STEP == 4 ? 0x141 : 0x140;  // quad_perm, mirrors
  struct Words {
    int at[sizeof(T) / 4];
  } words = __builtin_bit_cast(Words, x);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; i++)
    words.at[i] = __builtin_amdgcn_update_dpp(words.at[i], words.at[i], CONTROL, 15, 15, true);
  return __builtin_bit_cast(T, words);
}
// The value of lane `from`, the same for all lanes, in scalar registers.
template <class T>
GPU_FN T lane_value(T x, unsigned from) {
  static_assert(sizeof(T) % 4 == 0, "a lane hands over whole registers");
  struct Words {
    int at[sizeof(T) / 4];
  } words = __builtin_bit_cast(Words, x);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; i++) words.at[i] = __builtin_amdgcn_readlane(words.at[i], int(from));
  return __builtin_bit_cast(T, words);
}
// Lane 0's value, in a scalar register.
GPU_FN unsigned uniform(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }

// ---- matrix instructions: layouts are in gpu_host.hpp ---------------------------------------------------------------
#if GPU_CDNA
GPU_FN f32x4 mfma_f32_16x16x16_f16(f16x4 a, f16x4 b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
GPU_FN f32x4 mfma_f32_16x16x16_bf16(bf16x4 a, bf16x4 b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
}
GPU_FN f32x16 mfma_f32_32x32x8_f16(f16x4 a, f16x4 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}
GPU_FN f32x16 mfma_f32_32x32x8_bf16(bf16x4 a, bf16x4 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0);
}
GPU_FN f32x4 mfma_f32_16x16x4_f32(float a, float b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, 0, 0, 0);
}
GPU_FN f32x16 mfma_f32_32x32x2_f32(float a, float b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, c, 0, 0, 0);
}
#endif
#if GPU_CDNA4
GPU_FN f32x4 mfma_f32_16x16x32_f16(f16x8 a, f16x8 b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, 0, 0, 0);
}
GPU_FN f32x4 mfma_f32_16x16x32_bf16(bf16x8 a, bf16x8 b, f32x4 c) {
  using Operand = __bf16 __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b), c, 0, 0,
                                                 0);
}
#endif
#if GPU_RDNA3
GPU_FN f32x8 wmma_f32_16x16x16_f16(f16x16 a, f16x16 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}
GPU_FN f32x8 wmma_f32_16x16x16_bf16(bf16x16 a, bf16x16 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
}
#endif
#if GPU_RDNA4
GPU_FN f32x8 wmma_f32_16x16x16_f16(f16x8 a, f16x8 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}
GPU_FN f32x8 wmma_f32_16x16x16_bf16(bf16x8 a, bf16x8 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
}
#endif

}  // namespace gpu
