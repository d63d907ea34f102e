// The vector types of gpu.hpp, shared by its GPU and its CPU half.
#pragma once

namespace gpu {
using half = _Float16;

#define GPU_VECTOR(name, element, count) using name = element __attribute__((ext_vector_type(count)))
GPU_VECTOR(f32x2, float, 2);
GPU_VECTOR(f32x4, float, 4);
GPU_VECTOR(f32x8, float, 8);
GPU_VECTOR(f32x16, float, 16);
GPU_VECTOR(f16x2, _Float16, 2);
GPU_VECTOR(f16x4, _Float16, 4);
GPU_VECTOR(f16x8, _Float16, 8);
GPU_VECTOR(f16x16, _Float16, 16);
// The 16 bits of a bfloat16 each.
GPU_VECTOR(bf16x2, short, 2);
GPU_VECTOR(bf16x4, short, 4);
GPU_VECTOR(bf16x8, short, 8);
GPU_VECTOR(bf16x16, short, 16);
GPU_VECTOR(u32x2, unsigned int, 2);
GPU_VECTOR(u32x4, unsigned int, 4);
#undef GPU_VECTOR
}  // namespace gpu
