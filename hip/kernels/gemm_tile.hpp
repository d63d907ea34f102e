// The tiles of a 16-bit matrix product: how an operand comes from memory, is decoded, and lies in LDS.
//
// A tile is ROWS x DEPTH elements, DEPTH = 32 of them along K, so that a row is four slots of 16 bytes (8 elements).
// LDS holds both operands K-contiguous, whatever their order in memory, without padding; slot() permutes the slots so
// that eight lanes that read the same chunk of eight rows, and lanes that write the four chunks of a row, meet all 32
// banks once (the transposed store meets 32 banks twice for its 64 lanes, which is the least there is):
//
//     row r, K chunk c (8 elements)   ->   slot 4 * (r ^ (r >> 3 & 1)) + (c ^ (r >> 1 & 3))
//
// Operands are read in chunks of 8 elements: one 128-bit load, or what a weight's format takes for them. A chunk
// outside of the matrix is read at a clamped place and replaced by zeros only where it lies beyond K: rows beyond M or
// N make results that nobody stores.
#pragma once
#include "weight_formats.hpp"

namespace gemm {

constexpr int DEPTH = 32;
constexpr int CHUNKS = DEPTH / 8;

GPU_FN int slot(int row, int chunk) { return 4 * (row ^ (row >> 3 & 1)) + (chunk ^ (row >> 1 & 3)); }

GPU_FN gpu::u32x4 zero_unless(bool inside, gpu::u32x4 x) {
  const unsigned keep = inside ? 0xffffffffu : 0u;
  return x & gpu::u32x4{keep, keep, keep, keep};
}

// ---- sources: `fetch` starts the loads of 8 elements, `decode` makes 16-bit operands of what arrived ----
// `look` starts, a tile earlier, the loads that those of `fetch` wait for; `arrive` keeps the wait for those where it
// stands.
struct Nothing {};

// Elements of 16 bits, row-major with `cols` a row. ALIGNED: cols is a multiple of 8 and the address of 16, so that a
// chunk of 8 lies wholly in a row or outside of it.
template <bool ALIGNED> struct Dense {
  using Raw = gpu::u32x4;
  using Ahead = Nothing;
  static constexpr bool DECODES = false;
  const unsigned short* data;

  // 8 elements at `offset` from element `origin` (the same for all lanes); `count` of them lie in the matrix.
  GPU_FN Ahead look(long, unsigned) const { return {}; }
  GPU_FN Raw fetch(long origin, unsigned offset, int count, Ahead) const {
    const char* p = (const char*)(data + origin);
    if (ALIGNED) return gpu::load16(p + (unsigned long)(2u * offset));
    gpu::u32x4 x = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned e = *(const unsigned short*)(p + (unsigned long)(2u * (offset + (i < count ? i : 0))));
      x[i / 2] |= (i < count ? e : 0u) << (16 * (i & 1));
    }
    return x;
  }
  GPU_FN static void arrive(Raw& raw) { raw = gpu::optimization_barrier(raw); }
  GPU_FN gpu::u32x4 decode(Raw raw) const { return raw; }
};

// A frozen weight of some format (weight_formats.hpp), decoded to T.
template <class T, class Format> struct Weight : Format {
  static constexpr bool DECODES = true;
  GPU_FN gpu::u32x4 decode(const typename Format::Raw& raw) const {
    const float s = this->scale(raw);
    gpu::u32x4 x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = this->value(raw, 2 * i), odd = this->value(raw, 2 * i + 1);
      x[i] = T::pack_finite(even * s, odd * s);
    }
    return x;
  }
};

// ---- tiles -------------------------------------------------------------------------------------------------------

// ROWS x DEPTH of an operand that lies [rows, K] in memory (K contiguous): thread t owns chunk t % 4 of its rows.
template <class Source, int ROWS, int THREADS> struct AlongK {
  static constexpr int LOADS = ROWS * CHUNKS / THREADS;
  static_assert(ROWS * CHUNKS % THREADS == 0 && THREADS % CHUNKS == 0, "every thread has the same number of chunks");
  Source source;
  long origin;
  int k_total, first;
  unsigned offsets[LOADS];
  typename Source::Raw raw[LOADS];
  typename Source::Ahead ahead[LOADS];

  GPU_FN AlongK(const Source& s, long base, int row0, int rows, int k, int thread) : source(s), k_total(k) {
    origin = base + (long)row0 * k;
    first = 8 * (thread % CHUNKS);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = thread / CHUNKS + i * (THREADS / CHUNKS);
      offsets[i] = (unsigned)(row < rows - row0 ? row : rows - row0 - 1) * (unsigned)k;
    }
  }
  GPU_FN unsigned inside(int k0) const { return first < k_total - k0 ? first : 0; }
  GPU_FN void look(int k0, int) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) ahead[i] = source.look(origin + k0, offsets[i] + inside(k0));
  }
  GPU_FN void fetch(int k0, int) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      raw[i] = source.fetch(origin + k0, offsets[i] + inside(k0), k_total - k0 - first, ahead[i]);
  }
  // Load i of LOADS: decoded, and into LDS.
  GPU_FN void store(gpu::u32x4* lds, int k0, int thread, int i) {
    Source::arrive(raw[i]);
    put(lds, thread, i, zero_unless(first < k_total - k0, source.decode(raw[i])));
  }
  GPU_FN static void put(gpu::u32x4* lds, int thread, int i, gpu::u32x4 x) {
    lds[slot(thread / CHUNKS + i * (THREADS / CHUNKS), thread % CHUNKS)] = x;
  }
  // The same in PIECES parts (gemm_pieces.hpp), a tile behind the other.
  template <int PIECES> GPU_FN void store_pieces(gpu::u32x4* lds, int k0, int thread, int i) {
    auto values = source.values(raw[i]);
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
      put(lds + p * ROWS * CHUNKS, thread, i,
          zero_unless(first < k_total - k0, source.template next<PIECES>(values, p)));
  }
};

// ROWS x DEPTH of an operand that lies [K, rows] in memory: a thread reads 8 rows of two successive k and writes eight
// pairs. Lanes run over the 16 pairs of a tile first, so that their writes fall into different banks.
template <class Source, int ROWS, int THREADS> struct AcrossK {
  static constexpr int PAIRS = DEPTH / 2, LOADS = ROWS / 8 * PAIRS / THREADS;
  static_assert(ROWS / 8 * PAIRS % THREADS == 0 && THREADS % PAIRS == 0, "every thread has the same number of chunks");
  Source source;
  long origin;
  int k_total, stride;
  unsigned columns[LOADS];
  int counts[LOADS];
  typename Source::Raw raw[LOADS][2];
  typename Source::Ahead ahead[LOADS][2];

  GPU_FN AcrossK(const Source& s, long base, int row0, int rows, int k, int thread) : source(s), k_total(k) {
    origin = base + row0;
    stride = rows;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int column = 8 * (thread / PAIRS + i * (THREADS / PAIRS));
      columns[i] = column < rows - row0 ? column : 0;
      counts[i] = rows - row0 - (int)columns[i];
    }
  }
  GPU_FN unsigned place(int i, int k, int k0) const {
    return columns[i] + (unsigned)(k < k_total - k0 ? k : 0) * (unsigned)stride;
  }
  GPU_FN void look(int k0, int thread) {
    const int k = 2 * (thread % PAIRS);
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) ahead[i][j] = source.look(origin + (long)k0 * stride, place(i, k + j, k0));
  }
  GPU_FN void fetch(int k0, int thread) {
    const int k = 2 * (thread % PAIRS);
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        raw[i][j] = source.fetch(origin + (long)k0 * stride, place(i, k + j, k0), counts[i], ahead[i][j]);
  }
  GPU_FN void store(gpu::u32x4* lds, int k0, int thread, int i) {
    const int pair = thread % PAIRS, left = k_total - k0;
    Source::arrive(raw[i][0]);
    Source::arrive(raw[i][1]);
    put(lds, thread, i, zero_unless(2 * pair < left, source.decode(raw[i][0])),
        zero_unless(2 * pair + 1 < left, source.decode(raw[i][1])));
  }
  GPU_FN static void put(gpu::u32x4* lds, int thread, int i, gpu::u32x4 x, gpu::u32x4 y) {
    unsigned* words = (unsigned*)lds;
    const int pair = thread % PAIRS, row = 8 * (thread / PAIRS + i * (THREADS / PAIRS));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned k0 = x[j / 2], k1 = y[j / 2];
      const unsigned both = j & 1 ? (k0 >> 16 | (k1 & 0xffff0000u)) : ((k0 & 0xffffu) | k1 << 16);
      words[4 * slot(row + j, pair / 4) + pair % 4] = both;
    }
  }
  template <int PIECES> GPU_FN void store_pieces(gpu::u32x4* lds, int k0, int thread, int i) {
    const int pair = thread % PAIRS, left = k_total - k0;
    auto x = source.values(raw[i][0]), y = source.values(raw[i][1]);
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
      put(lds + p * ROWS * CHUNKS, thread, i, zero_unless(2 * pair < left, source.template next<PIECES>(x, p)),
          zero_unless(2 * pair + 1 < left, source.template next<PIECES>(y, p)));
  }
};

}  // namespace gemm
