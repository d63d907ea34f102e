// The tiles of a float32 GEMM: ROWS x DEPTH of an operand, decoded to float32 as it is stored in LDS.
//
// LDS holds [k][row] without padding: element (k, r) at k * ROWS + (r ^ 8 (k / 4) ^ 16 (k % 2)). A wave that stores 4
// chunks of 8 rows (operand with K contiguous) hits 32 different banks; a 128-bit read of 4 successive rows stays one;
// and the 16 lanes of a matrix instruction that read row k lie 16 banks from those that read row k + 1.
// Operands are read 4 elements at a time: 128 bits of float32, 64 of a 16-bit type, or what a weight's format
// takes for them. Which of them a lane reads is computed once: in the loop a load is a base that all lanes share and
// a lane's register. A source: scaled(offset in elements) gives what its fetch(origin, scaled offset, count) takes.
#pragma once
#include "gemm_epilogue.hpp"

namespace gemm {

constexpr int DEPTH_F32 = 16;

GPU_FN int place(int stride, int k, int row) { return k * stride + (row ^ (k / 4 * 8) ^ (k % 2 * 16)); }

// Rows and address are multiples of 4 elements. MIXED: of the dtype named at run time, otherwise float32.
template <bool MIXED> struct DenseF32 {
  using Raw = gpu::u32x4;  // of a 16-bit dtype only the lower half
  const void* data;
  int kind;
  GPU_FN int shift() const { return MIXED && kind != 0 ? 1 : 2; }
  GPU_FN unsigned scaled(unsigned offset) const { return offset << shift(); }  // bytes, for a load needs no more
  // RDNA: no branch on the dtype, or the compiler spills in the multiply-add loop. CDNA: one, which saves conversions.
  GPU_FN Raw fetch(long origin, unsigned bytes, int) const {
    const char* p = (const char*)data + (origin << shift());
    if (!MIXED || (GPU_CDNA && kind == 0)) return gpu::load16(p + (unsigned long)bytes);
    if (GPU_CDNA) {
      const gpu::u32x2 x = *(const gpu::u32x2*)(p + (unsigned long)bytes);
      return gpu::u32x4{x[0], x[1], 0u, 0u};
    }
    const gpu::u32x2 lo = *(const gpu::u32x2*)(p + (unsigned long)bytes);
    const gpu::u32x2 hi = *(const gpu::u32x2*)(p + (kind == 0 ? 8 : 0) + (unsigned long)bytes);
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

struct AnyF32 {  // any dtype, any alignment: one element at a time
  using Raw = gpu::f32x4;
  const void* data;
  int kind;
  GPU_FN unsigned scaled(unsigned offset) const { return offset; }
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
  GPU_FN unsigned scaled(unsigned offset) const { return offset; }
  GPU_FN Raw fetch(long origin, unsigned offset, int) const { return this->fetch4(origin, offset); }
  GPU_FN gpu::f32x4 decode(Raw raw) const {
    const float s = this->scale(raw);
    gpu::f32x4 x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = s * this->value(raw, i);
    return x;
  }
};

// WHOLE: all of a tile's K is there, and nothing is masked. Otherwise the first `there` of it are.
template <class S, int ROWS, int THREADS, bool ALONG_K> struct TileF32 {
  static constexpr int CHUNKS_K = DEPTH_F32 / 4, LOADS = ROWS * CHUNKS_K / THREADS, STRIDE = ROWS;
  static constexpr int STEP = THREADS / (ALONG_K ? CHUNKS_K : ROWS / 4);  // rows (k) from a load to the next
  static_assert(ROWS * CHUNKS_K % THREADS == 0, "every thread has the same number of chunks");
  static_assert(STEP % (ALONG_K ? 32 : 4) == 0, "in place() loads of a thread differ in bits that it has not");
  S source;
  long origin;
  int stride;
  unsigned first[LOADS], offsets[LOADS];  // of a load, scaled: with the tile's first k, with its own
  int counts[LOADS];                      // rows from a load's own on
  typename S::Raw raw[LOADS];

  GPU_FN TileF32(const S& s, long base, int row0, int all_rows, int k, int thread)
      : source(s), origin(base + (ALONG_K ? (long)row0 * k : row0)), stride(ALONG_K ? k : all_rows) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int r = row(thread, i), rows = all_rows - row0;
      const unsigned inside = ALONG_K ? (unsigned)(r < rows ? r : rows - 1) * (unsigned)stride : r < rows ? r : 0;
      first[i] = source.scaled(inside);
      offsets[i] = source.scaled(inside + (unsigned)depth(thread, i) * (ALONG_K ? 1u : (unsigned)stride));
      counts[i] = rows - r;
    }
  }
  // Where the row of a load along K lies instead, from `origin` on.
  GPU_FN void move_row(int i, unsigned inside, int thread) {
    first[i] = source.scaled(inside);
    offsets[i] = source.scaled(inside + (unsigned)depth(thread, i));
  }
  GPU_FN static int row(int thread, int i) {
    return ALONG_K ? thread / CHUNKS_K + i * STEP : thread % (ROWS / 4) * 4;
  }
  GPU_FN static int depth(int thread, int i) {
    return ALONG_K ? 4 * (thread % CHUNKS_K) : thread / (ROWS / 4) + i * STEP;
  }
  template <bool WHOLE> GPU_FN void fetch(int k0, int there, int thread) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int left = there - depth(thread, i);
      // Else the compiler keeps 64-bit addresses instead, and moves them all in each turn of the loop.
      offsets[i] = gpu::optimization_barrier(offsets[i]);
      raw[i] = source.fetch(origin + (ALONG_K ? k0 : (long)k0 * stride), WHOLE || left > 0 ? offsets[i] : first[i],
                            !ALONG_K ? counts[i] : WHOLE ? 4 : left);
    }
  }
  // To lds + `to` bytes, 0 or a power of two beyond the tile. Addresses of place() that differ by more than a constant
  // differ by its bits of k alone: by 16 (k % 2) between elements of a chunk, by 8 (k / 4) between loads across K.
  template <bool WHOLE> GPU_FN void store(float* lds, int to, int there, int thread) {
    constexpr int FORMS = ALONG_K ? 2 : LOADS, BYTES = 4 * (ALONG_K ? 16 : 2 * STEP);
    const int first_at = 4 * place(STRIDE, depth(thread, 0), row(thread, 0)) + to;
    int at[FORMS];
#pragma unroll
    for (int i = 0; i < FORMS; ++i) at[i] = gpu::optimization_barrier(first_at ^ BYTES * i);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      gpu::f32x4 x = source.decode(raw[i]);
      if (!WHOLE) x = depth(thread, i) < there ? x : gpu::f32x4{0.0f, 0.0f, 0.0f, 0.0f};
      if (ALONG_K) {
#pragma unroll
        for (int j = 0; j < 4; ++j) *(float*)((char*)lds + at[j % 2] + 4 * (j * STRIDE + i * STEP)) = x[j];
      } else {
        *(gpu::f32x4*)((char*)lds + at[i] + 4 * i * STEP * STRIDE) = x;
      }
    }
  }
};

}  // namespace gemm
