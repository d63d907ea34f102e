// The tiles of a 16-bit matrix product: how an operand comes from memory, is decoded, and lies in LDS.
//
// A tile is ROWS x DEPTH elements, DEPTH = 32 of them along K, so that a row is four slots of 16 bytes (8 elements).
// LDS holds both operands K-contiguous, whatever their order in memory, without padding; slot() permutes the slots so
// that eight lanes that read the same chunk of eight rows, and lanes that write the four chunks of a row, meet all 32
// banks once (the transposed store meets 32 banks twice for its 64 lanes, which is the least there is):
//
//     row r, K chunk c (8 elements)   ->   slot 4 * (r ^ (r >> 3 & 1)) + (c ^ (r >> 1 & 3))
//
// Operands are read in chunks of 8 elements: one 128-bit load, or for NF4 32 bits of codes and one scale. A chunk
// outside of the matrix is read at a clamped place and replaced by zeros only where it lies beyond K: rows beyond M or
// N make results that nobody stores.
#pragma once
#include "gpu.hpp"

// How many waves a SIMD must be able to hold: bounds the registers that the compiler may take.
#if defined(GPU_HOST)
#define GPU_WAVES_PER_SIMD(count)
#define GPU_PIN(x) ((void)0)
GPU_FN float lookup16(float table, unsigned codes, int at) { return gpu::shuffle(table, codes >> at & 15u); }
GPU_FN unsigned upper_halves(unsigned lo, unsigned hi) { return lo >> 16 | (hi & 0xffff0000u); }
#else
#define GPU_WAVES_PER_SIMD(count) __attribute__((amdgpu_waves_per_eu(count)))
// What is computed from x is computed after this place: keeps the wait for a load where its value is used.
#define GPU_PIN(x) asm volatile("" : "+v"(x))
// Entry (codes >> at) % 16 of a table of which lane l holds entry l % 16.
GPU_FN float lookup16(float table, unsigned codes, int at) {
  const unsigned address = (at < 2 ? codes << (2 - at) : codes >> (at - 2)) & 60u;  // in bytes
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((int)address, __builtin_bit_cast(int, table)));
}
GPU_FN unsigned upper_halves(unsigned lo, unsigned hi) { return __builtin_amdgcn_perm(hi, lo, 0x07060302u); }
#endif

namespace gemm {

constexpr int DEPTH = 32;
constexpr int CHUNKS = DEPTH / 8;

GPU_FN int slot(int row, int chunk) { return 4 * (row ^ (row >> 3 & 1)) + (chunk ^ (row >> 1 & 3)); }

GPU_FN gpu::u32x4 zero_unless(bool inside, gpu::u32x4 x) {
  const unsigned keep = inside ? 0xffffffffu : 0u;
  return x & gpu::u32x4{keep, keep, keep, keep};
}

// ---- sources: `fetch` starts the loads of 8 elements, `decode` makes 16-bit operands of what arrived ----
// `look` starts, a tile earlier, the loads that those of `fetch` wait for.
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
  GPU_FN static void pin(Raw& raw) { GPU_PIN(raw); }
  GPU_FN gpu::u32x4 decode(Raw raw) const { return raw; }
};

// The 16 NF4 values (Dettmers et al. 2023, appendix E), one a lane: a lookup is a shuffle, and takes no LDS space.
GPU_FN float nf4_value(int lane) {
  constexpr float values[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
  float x = values[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) x = (lane & 15) == i ? values[i] : x;
  return x;
}

// An offset of 32 bits: one register beside a base that all lanes share. Tables are smaller than 4 GiB.
GPU_FN float float_at(const float* p, unsigned i) { return *(const float*)((const char*)p + (unsigned long)(4u * i)); }

// NF4 weights (bitsandbytes' layout): element 2j in the high nibble of byte j, one scale for 2^block_shift elements;
// NESTED: the scale is nested_code[absmax] * nested_absmax + offset. Rows are a multiple of 8 elements, blocks too.
template <class T, bool NESTED> struct NF4 {
  static constexpr bool DECODES = true;
  struct Ahead {  // of a nested scale: where in nested_code, and its own scale
    unsigned index;
    float nested;
  };
  struct Raw {
    unsigned codes;
    float absmax, nested;  // NESTED: the entry of nested_code, and its scale
  };
  const unsigned char* data;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_code;
  float nested_offset, value;  // value: nf4_value(lane)
  int block_shift, nested_shift;

  // 32 bits: a weight has fewer than 2^32 elements.
  GPU_FN unsigned block(long origin, unsigned offset) const { return ((unsigned)origin + offset) >> block_shift; }
  GPU_FN Ahead look(long origin, unsigned offset) const {
    Ahead ahead{};
    if (NESTED) {
      const unsigned i = block(origin, offset);
      ahead.index = ((const unsigned char*)absmax)[(unsigned long)i];
      ahead.nested = float_at(nested_absmax, i >> nested_shift);
    }
    return ahead;
  }
  GPU_FN Raw fetch(long origin, unsigned offset, int, Ahead ahead) const {
    Raw raw{};
    if (NESTED) GPU_PIN(ahead.index);  // or the compiler waits for it a tile early, to scale it
    if (NESTED) GPU_PIN(ahead.nested);
    raw.codes = *(const unsigned*)(data + origin / 2 + (unsigned long)(offset / 2));
    raw.absmax = NESTED ? float_at(nested_code, ahead.index) : float_at((const float*)absmax, block(origin, offset));
    raw.nested = ahead.nested;
    return raw;
  }
  GPU_FN static void pin(Raw& raw) {
    GPU_PIN(raw.codes);
    GPU_PIN(raw.absmax);
  }
  GPU_FN float scale(const Raw& raw) const {
    return NESTED ? gpu::multiply_then_add(raw.absmax, raw.nested, nested_offset) : raw.absmax;
  }
  GPU_FN gpu::u32x4 decode(const Raw& raw) const {
    const float s = scale(raw);
    gpu::u32x4 x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = lookup16(value, raw.codes, 8 * i + 4), odd = lookup16(value, raw.codes, 8 * i);
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
    Source::pin(raw[i]);
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
    Source::pin(raw[i][0]);
    Source::pin(raw[i][1]);
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
