// Operands of the attention's gradient: the rows that a work-group owns, and tiles of the walked rows in LDS, read
// along the head width or transposed. The pipeline is in attention_gradient.hpp.
#pragma once
#include "attention_mask.hpp"
#include "attention_matrix.hpp"

namespace attention {

#if GPU_CDNA
constexpr int WAVES = 8;
using Splat = Acc;  // of one number in all elements: four registers, not four moves at each use
#else
constexpr int WAVES = 4;
using Splat = float;
#endif
constexpr int THREADS = WAVES * GPU_WAVE;

// How waves share the owned rows, the columns of every matmul. Heads of 256: on CDNA a wave has half as many of them;
// on RDNA, where one has no registers for results of that width, two neighboring waves have the same ones, and a half
// of the width each.
template <int D>
struct Share {
  static constexpr int HALVES = !GPU_CDNA && D > 128 ? 2 : 1, WIDTH = D / HALVES;
  static constexpr bool PAIRED = HALVES > 1;
  static constexpr int TILES = GPU_CDNA && D <= 128 ? 2 : 1;
  static constexpr int WAVE_COLUMNS = 16 * TILES, COLUMNS = WAVES / HALVES * WAVE_COLUMNS;
  GPU_FN static int place() { return int(gpu::wave()) / HALVES; }  // which WAVE_COLUMNS are the wave's
  GPU_FN static int first_element() { return PAIRED ? int(gpu::wave() % HALVES) * WIDTH : 0; }
};

// ---- tiles of rows in LDS -------------------------------------------------------------------------------------------
// Chunk c (128 bits) of row r lies in slot c ^ swizzle(r) of the row. CDNA serves 128-bit reads eight lanes at a time,
// 0-3 with 20-23, 4-7 with 16-19 and so on: along, rows 0-3 of chunk c with rows 4-7 of chunk c ^ 1; across, chunks
// 0-3 of row r with chunks 4-7 of row r + 4. RDNA serves eight neighbors: along, eight consecutive rows;
// when rows are stored (attention_walked_twice.hpp), four chunks of row r with the same four of row r + 8 (RDNA3) or
// r + 4. All hit every bank once. swizzle(a ^ b) = swizzle(a) ^ swizzle(b).
GPU_FN constexpr u32 swizzle(u32 row) { return GPU_CDNA ? row % 4 * 2 : row % 8 ^ row / 8 % 2 * 4; }

// Float16 pairs times a power of two, which both halves of `lift` hold.
template <class Words>
GPU_FN Words lifted(Words x, u32 lift) {
#pragma unroll
  for (u32 i = 0; i < sizeof(Words) / 4; i++)
    x[i] = __builtin_bit_cast(u32, __builtin_bit_cast(gpu::f16x2, u32(x[i])) * __builtin_bit_cast(gpu::f16x2, lift));
  return x;
}

template <int ROWS, int D, int THREADS>
struct Tile : Staged<ROWS, D, THREADS> {
  using Base = Staged<ROWS, D, THREADS>;
  GPU_FN void lift(u32 by) {
#pragma unroll
    for (int i = 0; i < Base::LOADS; i++) this->at[i] = lifted(this->at[i], by);
  }
  GPU_FN void store(u32x4* lds) const {
    const u32 thread = optimization_barrier(gpu::thread());
#pragma unroll
    for (int i = 0; i < Base::LOADS; i++) {
      const u32 id = thread + i * THREADS, row = id / Base::CHUNKS, c = id % Base::CHUNKS;
      lds[row * Base::CHUNKS + (c ^ swizzle(row))] = this->at[i];
    }
  }
};

// ---- operands from a Tile -------------------------------------------------------------------------------------------
// What changes from one access of a lane to the next is an exclusive or of bits 4 to 6 of its first address, and a
// constant.
// Where `row` begins for a lane that reads rows of D elements along.
template <int D>
GPU_FN u32 own_along(u32 row) {
  return row * (D * 2) + ((GPU_RDNA3 ? 0 : u32(group())) ^ swizzle(row)) * 16;
}
GPU_FN u32x4 read_at(const u32x4* lds, u32 lane_at, u32 bytes) {
  return *(const u32x4*)((const char*)lds + ((lane_at ^ bytes % 128) + bytes / 128 * 128));
}
// `further`: bytes, a multiple of 128.
GPU_FN Chunk read_along(const u32x4* lds, u32 lane_at, int step, u32 further = 0) {
  Chunk x;
#if GPU_CDNA
  const u32x4 v = read_at(lds, lane_at, u32(step) * 64 + further);
  x.at[0] = v.lo, x.at[1] = v.hi;
#elif GPU_RDNA4
  x.at[0] = read_at(lds, lane_at, u32(step) * 32 + further);
#else
  x.at[0].lo = read_at(lds, lane_at, u32(step) * 32 + further);
  x.at[0].hi = read_at(lds, lane_at, u32(step) * 32 + further + 16);
#endif
  return x;
}

}  // namespace attention
