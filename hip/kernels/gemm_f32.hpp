// The tiles of a float32 product: ROWS x DEPTH of an operand, decoded to float32 on the way into LDS.
//
// LDS holds [k][row] without padding: element (k, r) at k * ROWS + (r ^ 8 (k / 4) ^ 16 (k % 2)). A wave that stores 4
// chunks of 8 rows (operand with K contiguous) meets 32 different banks; a 128-bit read of 4 successive rows stays one;
// and the 16 lanes of a matrix instruction that read row k lie 16 banks from those that read row k + 1.
// Operands are read 4 elements at a time: 128 bits of float32, 64 of a 16-bit type, or what a weight's format
// takes for them.
#pragma once
#include "gemm_epilogue.hpp"

namespace gemm {

constexpr int DEPTH_F32 = 16;

GPU_FN int place(int stride, int k, int row) { return k * stride + (row ^ (k / 4 * 8) ^ (k % 2 * 16)); }

// Rows and address are multiples of 4 elements. MIXED: of the kind named at run time, otherwise float32.
template <bool MIXED> struct DenseF32 {
  using Raw = gpu::u32x4;  // of a 16-bit kind only the lower half
  const void* data;
  int kind;
  // RDNA: no branch on the kind, or the compiler spills in the multiply-add loop. CDNA: one, which saves conversions.
  GPU_FN Raw fetch(long origin, unsigned offset, int) const {
    if (!MIXED) return gpu::load16((const float*)data + origin + (unsigned long)offset);
    if (GPU_CDNA && kind == 0) return gpu::load16((const float*)data + origin + (unsigned long)offset);
    if (GPU_CDNA) {
      const gpu::u32x2 x = *(const gpu::u32x2*)((const unsigned short*)data + origin + (unsigned long)offset);
      return gpu::u32x4{x[0], x[1], 0u, 0u};
    }
    const int shift = kind == 0 ? 2 : 1;
    const char* p = (const char*)data + (origin << shift) + ((unsigned long)offset << shift);
    const gpu::u32x2 lo = *(const gpu::u32x2*)p, hi = *(const gpu::u32x2*)(p + (kind == 0 ? 8 : 0));
    return gpu::u32x4{lo[0], lo[1], hi[0], hi[1]};
  }
  GPU_FN gpu::f32x4 decode(Raw raw) const {
    const gpu::f32x4 wide = __builtin_bit_cast(gpu::f32x4, raw);
    if (!MIXED || (GPU_CDNA && kind == 0)) return wide;
    gpu::f32x4 x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float narrow = widen((unsigned short)(raw[i / 2] >> (16 * (i & 1))), kind);
      x[i] = !GPU_CDNA && kind == 0 ? wide[i] : narrow;
    }
    return x;
  }
};

struct AnyF32 {  // any kind, any alignment: one element at a time
  using Raw = gpu::f32x4;
  const void* data;
  int kind;
  GPU_FN Raw fetch(long origin, unsigned offset, int count) const {
    Raw x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e = read(data, kind, origin + (unsigned long)(offset + (i < count ? i : 0)));
      x[i] = i < count ? e : 0.0f;
    }
    return x;
  }
  GPU_FN gpu::f32x4 decode(Raw raw) const { return raw; }
};

// A frozen weight of some format.
template <class Format> struct WeightF32 : Format {
  using Raw = typename Format::Raw4;
  GPU_FN Raw fetch(long origin, unsigned offset, int) const { return this->fetch4(origin, offset); }
  GPU_FN gpu::f32x4 decode(Raw raw) const {
    const float s = this->scale(raw);
    gpu::f32x4 x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = s * this->value(raw, i);
    return x;
  }
};

template <class S, int ROWS, int THREADS, bool ALONG_K> struct TileF32 {
  static constexpr int CHUNKS_K = DEPTH_F32 / 4, LOADS = ROWS * CHUNKS_K / THREADS, STRIDE = ROWS;
  static_assert(ROWS * CHUNKS_K % THREADS == 0, "every thread has the same number of chunks");
  S source;
  long origin;
  int k_total, stride, row0, rows;
  typename S::Raw raw[LOADS];

  GPU_FN TileF32(const S& s, long base, int first_row, int all_rows, int k, int)
      : source(s), k_total(k), stride(ALONG_K ? k : all_rows), row0(first_row), rows(all_rows - first_row) {
    origin = base + (ALONG_K ? (long)first_row * k : first_row);
  }
  GPU_FN static int row(int thread, int i) {
    return ALONG_K ? thread / CHUNKS_K + i * (THREADS / CHUNKS_K) : (thread + i * THREADS) % (ROWS / 4) * 4;
  }
  GPU_FN static int depth(int thread, int i) {
    return ALONG_K ? 4 * (thread % CHUNKS_K) : (thread + i * THREADS) / (ROWS / 4);
  }
  GPU_FN void fetch(int k0, int thread) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int r = row(thread, i), k = depth(thread, i), left = k_total - k0 - k;
      const int k_in = left > 0 ? k : 0;
      const unsigned along = (unsigned)(r < rows ? r : rows - 1) * (unsigned)stride + k_in;
      const unsigned across = (unsigned)k_in * (unsigned)stride + (r < rows ? r : 0);
      raw[i] = ALONG_K ? source.fetch(origin + k0, along, left)
                       : source.fetch(origin + (long)k0 * stride, across, rows - r);
    }
  }
  GPU_FN void store(float* lds, int k0, int thread) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int r = row(thread, i), k = depth(thread, i), left = k_total - k0 - k;
      const float keep = left > 0 ? 1.0f : 0.0f;
      gpu::f32x4 x = source.decode(raw[i]);
      x = keep != 0.0f ? x : gpu::f32x4{0.0f, 0.0f, 0.0f, 0.0f};
      if (ALONG_K) {
#pragma unroll
        for (int j = 0; j < 4; ++j) lds[place(STRIDE, k + j, r)] = x[j];
      } else {
        *(gpu::f32x4*)(lds + place(STRIDE, k, r)) = x;
      }
    }
  }
};

}  // namespace gemm
