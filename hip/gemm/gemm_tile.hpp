// The tiles of a 16-bit GEMM: how an operand comes from memory, is decoded, and lies in LDS.
//
// A tile is ROWS x DEPTH elements, DEPTH = 32 of them along K, so that a row is four slots of 16 bytes (8 elements).
// LDS holds both operands K-contiguous, whatever their order in memory, without padding; slot() permutes the slots so
// that eight lanes that read the same chunk of eight rows, and lanes that write the four chunks of a row, meet all 32
// banks once (the transposed store hits 32 banks twice for its 64 lanes, which is the least there is):
//
//     row r, K chunk c (8 elements)   ->   slot 4 * (r ^ (r >> 3 & 1)) + (c ^ (r >> 1 & 3))
//
// Operands are read in chunks of 8 elements: one 128-bit load, or the loads of a weight's format. A chunk outside of
// the matrix is read at a clamped address. Rows beyond M or N make results that are not stored. Beyond K both operands
// become zeros; where one is a frozen weight only that does, by its scale, so an infinity in the other's row gives a
// NaN instead of an infinity.
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

// ---- sources of operands --------------------------------------------------------------------------------------------
// `fetch` starts the loads of 8 elements; `open`, `look_up`, `word` and `pair` make operands of what arrived. `look`
// starts, a tile earlier, the loads that those of `fetch` depend on; `arrive` fixes the place of the wait for them.
// DECODES: `open` zeroes what lies beyond K. A word is two 16-bit elements: neighbors in one chunk, or the same
// element of two chunks.
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
    // Compared again once the elements are there: results kept until then, of CDNA's two tiles, spill scalar registers.
    const int inside = GPU_CDNA ? gpu::optimization_barrier(count) : count;
    gpu::u32x4 x = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned e = *(const unsigned short*)(p + (unsigned long)(2u * (offset + (i < count ? i : 0))));
      x[i / 2] |= (i < inside ? e : 0u) << (16 * (i & 1));
    }
    return x;
  }
  GPU_FN static void arrive(Raw& raw) { raw = gpu::optimization_barrier(raw); }
  using Open = gpu::u32x4;
  GPU_FN static Open open(Raw raw, bool) { return raw; }
  GPU_FN static void look_up(Open&, Raw, int) {}
  GPU_FN static unsigned word(Open x, int i) { return x[i]; }
  GPU_FN static unsigned pair(Open x, Open y, int i) {
    return i % 2 ? gpu::high_halves(x[i / 2], y[i / 2]) : gpu::low_halves(x[i / 2], y[i / 2]);
  }
};

// A frozen weight of some format (weight_formats.hpp), decoded to T.
template <class T, class Format> struct Weight : Format {
  static constexpr bool DECODES = true;
  struct Open {
    gpu::Eight values;  // before they are scaled
    float scale;
  };
  GPU_FN Open open(const typename Format::Raw& raw, bool inside) const {
    Open x;
    x.scale = inside ? this->scale(raw) : 0.0f;
    return x;
  }
  GPU_FN void look_up(Open& x, const typename Format::Raw& raw, int i) const { x.values.at[i] = this->value(raw, i); }
  GPU_FN static unsigned word(const Open& x, int i) {
    return rounded(gpu::f32x2{x.values.at[2 * i], x.values.at[2 * i + 1]} * gpu::f32x2{x.scale, x.scale});
  }
  GPU_FN static unsigned pair(const Open& x, const Open& y, int i) {
    return rounded(gpu::f32x2{x.values.at[i], y.values.at[i]} * gpu::f32x2{x.scale, y.scale});
  }
  GPU_FN static unsigned rounded(gpu::f32x2 x) { return T::pack_finite(x[0], x[1]); }
};

// ---- tiles: each thread owns OWNED chunks and makes four words of each ---------------------------------------------
// `open` for each chunk, then `look_up` and `make` for each word; make<ZERO> replaces what lies beyond K.

// ROWS x DEPTH of an operand that lies [rows, K] in memory (K contiguous): thread t owns chunk t % 4 of its rows.
template <class Source, int ROWS, int THREADS> struct AlongK {
  static constexpr int LOADS = ROWS * CHUNKS / THREADS, OWNED = LOADS;  // stored together; of a chunk
  static_assert(ROWS * CHUNKS % THREADS == 0 && THREADS % CHUNKS == 0, "every thread has the same number of chunks");
  static constexpr bool DECODES = Source::DECODES;
  Source source;
  long origin;
  int k_total, first;
  unsigned offsets[OWNED];
  typename Source::Raw raw[OWNED];
  typename Source::Ahead ahead[OWNED];
  typename Source::Open opened[OWNED];
  gpu::u32x4 chunk;

  GPU_FN AlongK(const Source& s, long base, int row0, int rows, int k, int thread) : source(s), k_total(k) {
    origin = base + (long)row0 * k;
    first = 8 * (thread % CHUNKS);
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      const int row = thread / CHUNKS + i * (THREADS / CHUNKS);
      offsets[i] = (unsigned)(row < rows - row0 ? row : rows - row0 - 1) * (unsigned)k;
    }
  }
  // The row of a chunk, and where that lies instead, from `origin` on.
  GPU_FN static int row(int thread, int i) { return thread / CHUNKS + i * (THREADS / CHUNKS); }
  GPU_FN void move_row(int i, unsigned offset, int) { offsets[i] = offset; }
  GPU_FN unsigned inside(int k0) const { return first < k_total - k0 ? first : 0; }
  GPU_FN void look(int k0, int, int i) { ahead[i] = source.look(origin + k0, offsets[i] + inside(k0)); }
  GPU_FN void fetch(int k0, int, int i) {
    raw[i] = source.fetch(origin + k0, offsets[i] + inside(k0), k_total - k0 - first, ahead[i]);
  }
  GPU_FN void open(int k0, int, int i) {
    Source::arrive(raw[i]);
    opened[i] = source.open(raw[i], first < k_total - k0);
  }
  GPU_FN void look_up(int word) {
#pragma unroll
    for (int j = 0; j < 2; ++j) source.look_up(opened[word / 4], raw[word / 4], 2 * (word % 4) + j);
  }
  // Into LDS where it is the last of four.
  template <bool ZERO> GPU_FN void make(gpu::u32x4* lds, int k0, int thread, int word) {
    chunk[word % 4] = Source::word(opened[word / 4], word % 4);
    if (word % 4 == 3) put(lds, thread, word / 4, ZERO ? zero_unless(first < k_total - k0, chunk) : chunk);
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
  static constexpr int PAIRS = DEPTH / 2, LOADS = ROWS / 8 * PAIRS / THREADS, OWNED = 2 * LOADS;
  static_assert(ROWS / 8 * PAIRS % THREADS == 0 && THREADS % PAIRS == 0, "every thread has the same number of chunks");
  static constexpr bool DECODES = Source::DECODES;
  Source source;
  long origin;
  int k_total, stride;
  unsigned columns[LOADS], offsets[LOADS][2];
  int counts[LOADS];
  typename Source::Raw raw[LOADS][2];
  typename Source::Ahead ahead[LOADS][2];
  typename Source::Open opened[LOADS][2];

  GPU_FN AcrossK(const Source& s, long base, int row0, int rows, int k, int thread) : source(s), k_total(k) {
    origin = base + row0;
    stride = rows;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int column = 8 * (thread / PAIRS + i * (THREADS / PAIRS));
      columns[i] = column < rows - row0 ? column : 0;
      counts[i] = rows - row0 - (int)columns[i];
#pragma unroll
      for (int j = 0; j < 2; ++j) offsets[i][j] = columns[i] + (unsigned)(2 * (thread % PAIRS) + j) * (unsigned)stride;
    }
  }
  // Of k or k + 1, as far as it matters to what lies beyond K: that of a frozen weight is a multiple of 8.
  GPU_FN static int depth(int thread, int j) { return 2 * (thread % PAIRS) + (DECODES ? 0 : j); }
  GPU_FN unsigned place(int i, int j, int thread, int k0) const {
    return depth(thread, j) < k_total - k0 ? offsets[i][j] : columns[i];
  }
  GPU_FN void look(int k0, int thread, int i) {
    ahead[i / 2][i % 2] = source.look(origin + (long)k0 * stride, place(i / 2, i % 2, thread, k0));
  }
  GPU_FN void fetch(int k0, int thread, int i) {
    raw[i / 2][i % 2] =
        source.fetch(origin + (long)k0 * stride, place(i / 2, i % 2, thread, k0), counts[i / 2], ahead[i / 2][i % 2]);
  }
  GPU_FN void open(int k0, int thread, int i) {
    Source::arrive(raw[i / 2][i % 2]);
    opened[i / 2][i % 2] = source.open(raw[i / 2][i % 2], depth(thread, i % 2) < k_total - k0);
  }
  GPU_FN void look_up(int word) {
#pragma unroll
    for (int j = 0; j < 2; ++j) source.look_up(opened[word / 8][j], raw[word / 8][j], word % 8);
  }
  template <bool ZERO> GPU_FN void make(gpu::u32x4* lds, int k0, int thread, int word) {
    const unsigned both = Source::pair(opened[word / 8][0], opened[word / 8][1], word % 8);
    put(lds, thread, word / 8, word % 8, ZERO ? both & mask(k0, thread) : both);
  }
  GPU_FN unsigned mask(int k0, int thread) const {
    const unsigned even = depth(thread, 0) < k_total - k0 ? 0xffffu : 0u;
    return depth(thread, 1) < k_total - k0 ? 0xffff0000u | even : even;
  }
  // k and k + 1 of row j of 8.
  GPU_FN static void put(gpu::u32x4* lds, int thread, int i, int j, unsigned both) {
    const int pair = thread % PAIRS, row = 8 * (thread / PAIRS + i * (THREADS / PAIRS)) + j;
    ((unsigned*)lds)[4 * slot(row, pair / 4) + pair % 4] = both;
  }
  template <int PIECES> GPU_FN void store_pieces(gpu::u32x4* lds, int k0, int thread, int i) {
    auto x = source.values(raw[i][0]), y = source.values(raw[i][1]);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const gpu::u32x4 even = source.template next<PIECES>(x, p), odd = source.template next<PIECES>(y, p);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        put(lds + p * ROWS * CHUNKS, thread, i, j, Dense<true>::pair(even, odd, j) & mask(k0, thread));
    }
  }
};

// Every chunk of a thread.
template <class Tile> GPU_FN void look_all(Tile& tile, int k0, int thread) {
#pragma unroll
  for (int i = 0; i < Tile::OWNED; ++i) tile.look(k0, thread, i);
}
template <class Tile> GPU_FN void fetch_all(Tile& tile, int k0, int thread) {
#pragma unroll
  for (int i = 0; i < Tile::OWNED; ++i) tile.fetch(k0, thread, i);
}
// Chunks [from, to) of a thread, which are there: into LDS.
template <bool ZERO, class Tile>
GPU_FN void store(Tile& tile, gpu::u32x4* lds, int k0, int thread, int from, int to) {
#pragma unroll
  for (int i = from; i < to; ++i) tile.open(k0, thread, i);
#pragma unroll
  for (int word = 4 * from; word < 4 * to; ++word) tile.look_up(word);
#pragma unroll
  for (int word = 4 * from; word < 4 * to; ++word) tile.template make<ZERO>(lds, k0, thread, word);
}

}  // namespace gemm
