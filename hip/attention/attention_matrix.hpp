// The matrix instructions as attention uses them: D = A B + C on 16 x 16 tiles, 16 of the inner dimension at a time.
//
// A score tile is made transposed to what the second matmul reads, so that no lane hands anything to another:
// S^T = K Q^T leaves in lane l column l % 16 (a query) and rows (keys) that are just the elements of B which lane l
// holds in O^T = V^T P^T. Only RDNA3 wants all 16 in both halves of a wave: there the halves swap theirs.
//
//                 CDNA (MFMA, wave64)   RDNA4 (WMMA, wave32)   RDNA3 (WMMA, wave32)
//   row(e)        4 (l / 16) + e        8 (l / 16) + e         2 e + l / 16           of D, in lane l
//   inner(r)      4 (l / 16) + r        8 (l / 16) + r         2 (r % 8) + r / 8     of A, B; A row, B column l % 16
//
// The order of the inner dimension is free as long as A and B agree: inner() is the one that D comes in, and matmuls
// over the head width (both operands read along it) take 128-bit chunks instead, chunk(): two instructions each on
// CDNA.
// Sources: AMD "Instinct MI300", "RDNA3" and "RDNA4" instruction set references (matrix layouts).
#pragma once
#include "gpu.hpp"

namespace attention {

using gpu::high_halves;
using gpu::low_halves;
using gpu::optimization_barrier;
using gpu::uniform_barrier;
using gpu::u32;
using gpu::u32x2;
using gpu::u32x4;
typedef u32 u32x8 __attribute__((ext_vector_type(8)));

GPU_FN int column() { return int(gpu::lane() % 16); }
GPU_FN int group() { return int(gpu::lane() / 16); }

#if GPU_CDNA
constexpr int INNER = 4, STEPS = 2, DEPTH = 32;  // inner elements of a lane; of a chunk: steps, depth
using Piece = u32x2;
using Acc = gpu::f32x4;
GPU_FN int row(int e) { return 4 * group() + e; }
GPU_FN int inner(int r) { return 4 * group() + r; }
#elif GPU_RDNA4
constexpr int INNER = 8, STEPS = 1, DEPTH = 16;
using Piece = u32x4;
using Acc = gpu::f32x8;
GPU_FN int row(int e) { return 8 * group() + e; }
GPU_FN int inner(int r) { return 8 * group() + r; }
#else
constexpr int INNER = 16, STEPS = 1, DEPTH = 16;
using Piece = u32x8;
using Acc = gpu::f32x8;
GPU_FN int row(int e) { return 2 * e + group(); }
GPU_FN int inner(int r) { return 2 * (r % 8) + r / 8; }
#endif
constexpr int ELEMENTS = 256 / GPU_WAVE;  // of D in a lane

// gfx90a's tensor cores take float16 subnormals (below 2^-14) for 0.
#if defined(__gfx90a__) || (defined(GPU_HOST) && GPU_HOST == 910)
constexpr bool FLUSHES_HALVES = true;
#else
constexpr bool FLUSHES_HALVES = false;
#endif

// ---- element types: how two float32 become 32 bits of operand -------------------------------------------------------
#if defined(GPU_HOST)
GPU_FN float exp2_fast(float x) { return gpu::exp2(x); }
GPU_FN bool any(bool yes) { return gpu::wave_max(yes ? 1.f : 0.f) > 0.f; }
#else
GPU_FN float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }  // denormal results are 0
GPU_FN bool any(bool yes) {
#if GPU_WAVE == 64
  return __builtin_amdgcn_ballot_w64(yes) != 0;
#else
  return __builtin_amdgcn_ballot_w32(yes) != 0;
#endif
}
#endif

struct F16 {
  GPU_FN static u32 pack(float a, float b) { return __builtin_bit_cast(u32, gpu::f16x2{gpu::half(a), gpu::half(b)}); }
  GPU_FN static u32 result(float a, float b) { return pack(a, b); }
  GPU_FN static float number(u32 bits) { return float(__builtin_bit_cast(gpu::half, (gpu::u16)bits)); }
};
// Right for finite numbers and infinities only.
template <gpu::Round MODE>
struct BF16 {
  GPU_FN static u32 rounded(float x) {
    const u32 bits = gpu::float_to_bits(x);
    if (MODE == gpu::Round::RTZ) return bits;
    if (MODE == gpu::Round::RTNA) return bits + 0x8000u;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  GPU_FN static u32 pack(float a, float b) { return high_halves(rounded(a), rounded(b)); }
  GPU_FN static u32 result(float a, float b) {
    return gpu::float_to_bf16_bits(a) | u32(gpu::float_to_bf16_bits(b)) << 16;
  }
  GPU_FN static float number(u32 bits) { return gpu::bits_to_float(bits << 16); }
};

#if GPU_CDNA
GPU_FN Acc mma(F16, Piece a, Piece b, Acc c) {
  return gpu::mfma_f32_16x16x16_f16(__builtin_bit_cast(gpu::f16x4, a), __builtin_bit_cast(gpu::f16x4, b), c);
}
template <gpu::Round MODE>
GPU_FN Acc mma(BF16<MODE>, Piece a, Piece b, Acc c) {
  return gpu::mfma_f32_16x16x16_bf16(__builtin_bit_cast(gpu::bf16x4, a), __builtin_bit_cast(gpu::bf16x4, b), c);
}
#if GPU_CDNA4
GPU_FN Acc mma32(F16, u32x4 a, u32x4 b, Acc c) {
  return gpu::mfma_f32_16x16x32_f16(__builtin_bit_cast(gpu::f16x8, a), __builtin_bit_cast(gpu::f16x8, b), c);
}
template <gpu::Round MODE>
GPU_FN Acc mma32(BF16<MODE>, u32x4 a, u32x4 b, Acc c) {
  return gpu::mfma_f32_16x16x32_bf16(__builtin_bit_cast(gpu::bf16x8, a), __builtin_bit_cast(gpu::bf16x8, b), c);
}
#endif
#else
#if GPU_RDNA4
using HalfPiece = gpu::f16x8;
using BFloatPiece = gpu::bf16x8;
#else
using HalfPiece = gpu::f16x16;
using BFloatPiece = gpu::bf16x16;
#endif
GPU_FN Acc mma(F16, Piece a, Piece b, Acc c) {
  return gpu::wmma_f32_16x16x16_f16(__builtin_bit_cast(HalfPiece, a), __builtin_bit_cast(HalfPiece, b), c);
}
template <gpu::Round MODE>
GPU_FN Acc mma(BF16<MODE>, Piece a, Piece b, Acc c) {
  return gpu::wmma_f32_16x16x16_bf16(__builtin_bit_cast(BFloatPiece, a), __builtin_bit_cast(BFloatPiece, b), c);
}
#endif

// x scale + shift: two to an instruction on CDNA.
GPU_FN Acc fused(Acc x, float scale, float shift) {
#if GPU_CDNA
  const gpu::f32x2 m(scale), n(shift);
  const gpu::f32x2 a = __builtin_elementwise_fma(x.lo, m, n), b = __builtin_elementwise_fma(x.hi, m, n);
  return Acc{a[0], a[1], b[0], b[1]};
#else
  return __builtin_elementwise_fma(x, Acc(scale), Acc(shift));
#endif
}

// ---- rows of a [rows, heads, D] slice in memory: reads beyond its end give 0 ----------------------------------------
#if defined(GPU_HOST)
struct Rows {
  const char* base;
  u32 bytes;
  GPU_FN Rows(const void* p, u32 bytes) : base((const char*)p), bytes(bytes) {}
  GPU_FN u32x4 load16(u32 at) const { return at < bytes ? gpu::load16(base + at) : u32x4(0u); }
  GPU_FN u32x2 load8(u32 at) const { return at < bytes ? *(const u32x2*)(base + at) : u32x2(0u); }
};
#else
struct Rows {
#if defined(__GFX9__)
  static constexpr int FORMAT = 0x00027000;
#elif defined(__GFX12__)
  static constexpr int FORMAT = 0x30014000;
#else
  static constexpr int FORMAT = 0x31014000;  // raw buffer, range checked by bytes
#endif
  __amdgpu_buffer_rsrc_t buffer;
  GPU_FN Rows(const void* p, u32 bytes)
      : buffer(__builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(p), 0, int(bytes), FORMAT)) {}
  // The whole offset goes into the lane's part: the scalar part is not range-checked on every GPU.
  GPU_FN u32x4 load16(u32 at) const { return __builtin_amdgcn_raw_buffer_load_b128(buffer, at, 0, 0); }
  GPU_FN u32x2 load8(u32 at) const { return __builtin_amdgcn_raw_buffer_load_b64(buffer, at, 0, 0); }
};
#endif

// 16 or 8 bytes of a row.
template <int WORDS>
GPU_FN void load_words(u32 (&to)[WORDS], const Rows& rows, u32 at) {
  if constexpr (WORDS == 4) {
    const u32x4 v = rows.load16(at);
#pragma unroll
    for (int w = 0; w < 4; w++) to[w] = v[w];
  } else {
    const u32x2 v = rows.load8(at);
    to[0] = v[0], to[1] = v[1];
  }
}

// ---- operands -------------------------------------------------------------------------------------------------------
// DEPTH of the head width of 16 rows, read along it.
struct Chunk {
  Piece at[STEPS];
};
template <class Load>
GPU_FN Chunk chunk(int step, Load load) {  // load(c): 128-bit chunk c of the lane's row (l % 16)
  Chunk x;
#if GPU_CDNA
  const u32x4 v = load(4 * step + group());
  x.at[0] = v.lo, x.at[1] = v.hi;
#elif GPU_RDNA4
  x.at[0] = load(2 * step + group());
#else
  x.at[0].lo = load(2 * step), x.at[0].hi = load(2 * step + 1);
#endif
  return x;
}
template <class T>
GPU_FN Acc multiply(T t, const Chunk& a, const Chunk& b, Acc c) {
#if GPU_CDNA4
  return mma32(t, u32x4{a.at[0][0], a.at[0][1], a.at[1][0], a.at[1][1]},
               u32x4{b.at[0][0], b.at[0][1], b.at[1][0], b.at[1][1]}, c);
#else
#pragma unroll
  for (int s = 0; s < STEPS; s++) c = mma(t, a.at[s], b.at[s], c);
  return c;
#endif
}

// B of the second matmul: a tile D of the first, rounded.
template <class T>
GPU_FN Piece piece_of(Acc d) {
  Piece p;
#if GPU_CDNA || GPU_RDNA4
#pragma unroll
  for (int i = 0; i < ELEMENTS / 2; i++) p[i] = T::pack(d[2 * i], d[2 * i + 1]);
#else
  // Mine are the keys 2 e + half: the even ones go first. They cross by the LDS, which takes no slot of the vector
  // unit.
  const u32 lane = gpu::lane() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 mine = T::pack(d[2 * i], d[2 * i + 1]);
    p[i] = gpu::shuffle(mine, lane);
    p[i + 4] = gpu::shuffle(mine, lane + 16);
  }
#endif
  return p;
}

// A of the second matmul from rows stored along the head width: a lane reads WIDE elements of INNER rows and
// transposes the block; its row l % 16 of piece j is element WIDE (l % 16) + j of the part, so that a lane's results
// lie together.
template <int D>
struct Transposed {
#if GPU_CDNA || GPU_RDNA4
  static constexpr int WIDE = D < 128 ? D / 16 : 8;
#else
  static constexpr int WIDE = 4;  // registers
#endif
  static constexpr int PARTS = D / 16 / WIDE, WORDS = WIDE / 2;
  u32 at[INNER][WORDS];

  GPU_FN static int first(int part, int row) { return WIDE * (16 * part + row); }

  GPU_FN void clear() {
#pragma unroll
    for (int r = 0; r < INNER; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) at[r][w] = 0u;
  }
  // `place`: byte offset of the first of the 16 rows; `stride`: bytes from row to row.
  GPU_FN void load(const Rows& rows, u32 place, u32 stride, int part) {
    const u32 mine = u32(part * 32 * WIDE + 2 * WIDE * column()) + u32(inner(0)) * stride;
#pragma unroll
    for (int r = 0; r < INNER; r++) {
      const u32 offset = mine + (place + u32(INNER == 16 ? inner(r) : r) * stride);
      load_words(at[r], rows, offset);
    }
  }
  GPU_FN Piece piece(int j) const {
    Piece p;
#pragma unroll
    for (int i = 0; i < INNER / 2; i++)
      p[i] = (j % 2 ? high_halves : low_halves)(at[2 * i][j / 2], at[2 * i + 1][j / 2]);
    return p;
  }
};

// ---- tiles of rows in LDS -------------------------------------------------------------------------------------------
// ROWS rows of D elements in 128-bit slots, swizzled by the row number so that 8 rows in a row fall on different banks.
template <int ROWS, int D, int THREADS>
struct Staged {
  static constexpr int CHUNKS = D / 8, SLOTS = ROWS * CHUNKS, LOADS = SLOTS / THREADS;
  static_assert(SLOTS % THREADS == 0, "every thread loads as much");
  u32x4 at[LOADS];

  GPU_FN static int slot(int row, int chunk) { return row * CHUNKS + (chunk ^ (row & 7)); }
  GPU_FN void load(const Rows& rows, u32 first_row, u32 stride) {
    const u32 thread = optimization_barrier(gpu::thread());
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const u32 id = thread + i * THREADS;
      at[i] = rows.load16((first_row + id / CHUNKS) * stride + id % CHUNKS * 16);
    }
  }
  GPU_FN void store(u32x4* lds) const {
    const u32 thread = optimization_barrier(gpu::thread());
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const u32 id = thread + i * THREADS;
      lds[slot(int(id / CHUNKS), int(id % CHUNKS))] = at[i];
    }
  }
  // Rows 16 tile .. of the tile in LDS as an operand. All its addresses follow from own_slot() by flipping low bits and
  // by constants.
  GPU_FN static int own_slot() { return slot(column(), GPU_RDNA3 ? 0 : group()); }
  GPU_FN static Chunk read(const u32x4* lds, int own, int tile, int step) {
    const int mine = GPU_RDNA3 ? 0 : group();
    return chunk(step, [&](int c) { return lds[(own ^ ((c - mine) & 7)) + ((c - mine) & ~7) + 16 * tile * CHUNKS]; });
  }
};

// WIDE results that lie together, 4 or 8, in float32 or rounded (bfloat16: RTNE).
template <class T>
struct Pairs {
  template <int WIDE>
  GPU_FN static void store(void* to, const float (&x)[WIDE]) {
    u32 words[WIDE / 2];
#pragma unroll
    for (int i = 0; i < WIDE / 2; i++) words[i] = T::result(x[2 * i], x[2 * i + 1]);
    if constexpr (WIDE == 8) gpu::store16(to, u32x4{words[0], words[1], words[2], words[3]});
    else *(u32x2*)to = u32x2{words[0], words[1]};
  }
  template <int WIDE>
  GPU_FN static void store_floats(float* to, const float (&x)[WIDE]) {
#pragma unroll
    for (int i = 0; i < WIDE; i += 4) gpu::store16(to + i, gpu::f32x4{x[i], x[i + 1], x[i + 2], x[i + 3]});
  }
};

// Sum and maximum over the lanes that share a column.
template <class Combine>
GPU_FN float over_column(float x, Combine combine) {
  const u32 lane = optimization_barrier(gpu::lane());
  x = combine(x, gpu::shuffle(x, lane ^ 16u));
  if (GPU_WAVE == 64) x = combine(x, gpu::shuffle(x, lane ^ 32u));
  return x;
}
GPU_FN float column_sum(float x) {
  return over_column(x, [](float a, float b) { return a + b; });
}
GPU_FN float column_max(float x) {
  return over_column(x, [](float a, float b) { return __builtin_fmaxf(a, b); });
}

}  // namespace attention
