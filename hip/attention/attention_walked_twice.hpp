// Loads the rows that attention's gradient walks over on RDNA: memory -> registers -> LDS. LDS holds them twice: along
// the head width, as loaded, and across it. They are transposed once, when stored, rather than by every wave between
// its matmuls. The first half of the waves loads y1, the other half y2; with heads of 256 every wave loads both.
#pragma once
#include "attention_operands.hpp"
#include "attention_walk.hpp"

namespace attention {

// A tile across: for each 16 of its rows, D rows of LDS of 32 bytes, one an element of the head width, that have these
// 16 in the order of inner(). Row 16 j + r of LDS is element first(0, r) + j, so that a lane's results lie together.
// The two 128-bit slots of every other four rows are the other way round: eight rows, read together, hit all banks.
template <int D>
struct AcrossTile {
  static constexpr int WIDE = D / 16, PARTS = 1, CHUNKS = D / 8, ROW = 32;
  GPU_FN static u32 swap(u32 row) { return row / 4 % 2; }
  GPU_FN static int first(int, int row) { return row % CHUNKS * 8 + row / CHUNKS * WIDE; }
  // `own`: where a lane's row l % 16 begins.
  GPU_FN static u32 own() { return u32(column()) * ROW + (swap(column()) ^ (GPU_RDNA3 ? 0 : group())) * 16; }
  GPU_FN static Piece read(const u32x4* lds, u32 own, u32 at, int j) {
    const char* rows = (const char*)lds + at + u32(j) * (16 * ROW);
    const auto slot = [&](u32 s) { return *(const u32x4*)(rows + (own ^ s * 16)); };
#if GPU_RDNA3
    Piece p;
    p.lo = slot(0), p.hi = slot(1);
    return p;
#else
    return slot(0);
#endif
  }
};

// A thread's share of a tile: eight elements of FOUR rows that are neighbors in the order of inner().
template <int ROWS, int D>
struct FourRows {
  using Across = AcrossTile<(D < 128 ? D : 128)>;  // of 256: half of the width behind the other
  static constexpr int FOUR = 4, CHUNKS = D / 8, THREADS = ROWS / FOUR * CHUNKS;
  static constexpr u32 ROW = D * 2, APART = GPU_RDNA3 ? 2 : 1;  // bytes of a row; rows from inner() to the next
  u32x4 at[FOUR];

  // Of 16 lanes four stand side by side in the head width, and four times four rows; so stores hit all banks.
  GPU_FN static u32 chunk(u32 thread) { return thread / 16 % (CHUNKS / 4) * 4 + thread % 4; }
  GPU_FN static u32 four(u32 thread) { return thread / 4 % 4; }
  GPU_FN static u32 part(u32 thread) { return thread / (4 * CHUNKS); }  // of 16 rows
  GPU_FN static u32 row(u32 thread) {
    const u32 in = four(thread);
    return part(thread) * 16 + (GPU_RDNA3 ? in % 2 * 8 + in / 2 : in * 4);
  }
  // Bytes from the tile's start in memory, and in LDS.
  GPU_FN static u32 source(u32 thread, u32 stride) { return row(thread) * stride + chunk(thread) * 16; }
  GPU_FN static u32 along(u32 thread) { return row(thread) * ROW + (chunk(thread) ^ swizzle(row(thread))) * 16; }
  GPU_FN static u32 across(u32 thread) {
    const u32 in = four(thread), c = chunk(thread);
    const u32 first = c / 16 * (128 * Across::ROW) + c % 16 * Across::ROW;
    return part(thread) * (16 * ROW) + first + (in / 2 ^ Across::swap(c)) * 16 + in % 2 * 8;
  }
  GPU_FN void load(const Rows& rows, u32 from, u32 stride) {
#pragma unroll
    for (int i = 0; i < FOUR; i++) at[i] = rows.load16(from + i * APART * stride);
  }
  GPU_FN void store_along(char* lds, u32 to) const {
#pragma unroll
    for (u32 i = 0; i < FOUR; i++) *(u32x4*)(lds + (to ^ swizzle(i * APART) * 16) + i * APART * ROW) = at[i];
  }
  GPU_FN void store_across(char* lds, u32 to) const {
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int w = k / 2;
      const auto halves = k % 2 ? high_halves : low_halves;
      const u32 further = u32(k % Across::WIDE * 16 + k / Across::WIDE * 8) * Across::ROW;
      *(u32x2*)(lds + to + further) = u32x2{halves(at[0][w], at[1][w]), halves(at[2][w], at[3][w])};
    }
  }
};

template <class T, int D, bool KEYS>
struct WalkedTwice {
  static constexpr bool PAIRED = Share<D>::PAIRED;
  static constexpr int ROWS = PAIRED ? 16 : 16 * THREADS / D;  // of a tile
  using Y = FourRows<ROWS, D>;
  static constexpr int MINE = 2 * Y::THREADS / THREADS;  // of y1 and y2, a thread has a share of so many
  // With heads of 256 both layouts of dk's and dv's rows do not fit LDS: they take turns in one buffer. For dq only y1
  // across is double-buffered; with narrower heads everything is.
  static constexpr bool TURNS = PAIRED && KEYS;
  // LDS, in bytes: y1 and y2 along, y1 and (dk, dv) y2 across, and (dk, dv) lse and delta of the rows.
  static constexpr u32 BYTES = ROWS * D * 2, ACROSS1 = TURNS ? 0 : 2 * BYTES, ACROSS2 = ACROSS1 + BYTES;
  static constexpr u32 STATS = ACROSS1 + (KEYS ? 2 : 1) * BYTES, BUFFER = STATS + (KEYS ? ROWS * 8 : 0);
  static constexpr u32 APART = PAIRED ? 0 : BUFFER, APART_ACROSS = PAIRED ? TURNS ? 0 : BYTES : BUFFER;  // two tiles
  static constexpr u32 WALKED_BYTES = BUFFER + APART_ACROSS;

  u32x4* lds;
  int wave;
  Y y[MINE];
  u32 y_from, y_along, y_across;     // in memory and in LDS
  RowStats<T, ROWS, false> of_rows;  // of the next tile

  // True if a thread's share `i` belongs to y2.
  GPU_FN bool second(int i) const { return MINE > 1 ? i > 0 : wave >= WAVES / 2; }
  GPU_FN void start_walked(u32 stride) {
    wave = int(gpu::wave());
    const u32 thread = gpu::thread() % Y::THREADS, matrix = second(0) ? 1 : 0;
    y_from = Y::source(thread, stride);
    y_along = Y::along(thread) + matrix * BYTES, y_across = Y::across(thread) + ACROSS1 + matrix * BYTES;
  }
  // The first wave loads lse and delta of the rows.
  GPU_FN void fetch(const Source& from, const Walk& w) {
    const int head = w.fetched<KEYS>();
    const u32 stride = uniform_barrier(from.y1.stride);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const Walked mine{second(i) ? from.y2.base : from.y1.base, stride, from.y1.bytes};
      y[i].load(mine.of_head(head, D * 2), y_from + u32(w.row) * stride, stride);
    }
    if (KEYS && wave == 0) of_rows.fetch(from, head, w.row);
  }
  GPU_FN void put_along(const Source& from, const Walk& w) {
    char* buffer = (char*)lds + u32(w.now) * APART;
#pragma unroll
    for (int i = 0; i < MINE; i++) y[i].store_along(buffer + i * BYTES, y_along);
    if (KEYS && wave == 0) of_rows.put((float*)(buffer + STATS), w.row, from.length, 1.f);
  }
  GPU_FN void put_across(const Walk& w) {
    char* buffer = (char*)lds + u32(w.now) * APART_ACROSS;
#pragma unroll
    for (int i = 0; i < MINE; i++)
      if (KEYS || !second(i)) y[i].store_across(buffer + i * BYTES, y_across);
  }
  // lse or delta (`which`) of the rows that a lane has of a result.
  GPU_FN Acc stats(const Walk& w, int which, int part) const {
    return stats_of((const float*)((const char*)lds + u32(w.now) * APART + STATS) + which * ROWS + 16 * part);
  }
};

}  // namespace attention
