// The rows that attention's gradient walks over on RDNA, on their way: memory -> registers -> LDS. There they lie
// twice: along the head width, as they come, and across it, transposed when they are stored: once for all waves, not by
// each of them beside its products. The first half of the waves brings y1, the other half y2.
#pragma once
#include "attention_operands.hpp"
#include "attention_range.hpp"
#include "attention_walk.hpp"

namespace attention {

// A tile across: for each 16 of its rows, D rows of LDS of 32 bytes, one an element of the head width, that have these
// 16 in the order of inner(). Row 16 j + r of LDS is element first(0, r) + j, so that a lane's results lie together. The
// two 128-bit slots of every other four rows are the other way round: eight rows, read together, meet all banks.
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

// What a thread brings of a tile: eight elements of FOUR rows that are neighbours in the order of inner().
template <int ROWS, int D>
struct FourRows {
  using Across = AcrossTile<D>;
  static constexpr int FOUR = 4, CHUNKS = D / 8, THREADS = ROWS / FOUR * CHUNKS;
  static constexpr u32 ROW = D * 2, APART = GPU_RDNA3 ? 2 : 1;  // bytes of a row; rows from inner() to the next
  u32x4 at[FOUR];

  // Of 16 lanes four stand side by side in the head width, and four times four rows; so stores meet all banks.
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
    return part(thread) * (16 * ROW) + c * Across::ROW + (in / 2 ^ Across::swap(c)) * 16 + in % 2 * 8;
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
  static constexpr int ROWS = 16 * THREADS / D;  // of a tile: a thread has one share of y1 or of y2
  using Y = FourRows<ROWS, D>;
  static_assert(2 * Y::THREADS == THREADS, "half of the threads bring y1, the others y2");
  // LDS, in bytes: a buffer has y1 and y2 along, y1 and (dk, dv) y2 across, and (dk, dv) lse and delta of the rows.
  static constexpr u32 BYTES = ROWS * D * 2, ALONG2 = BYTES, ACROSS1 = 2 * BYTES, ACROSS2 = 3 * BYTES;
  static constexpr u32 STATS = (KEYS ? 4 : 3) * BYTES, BUFFER = STATS + (KEYS ? ROWS * 8 : 0);
  static constexpr u32 WALKED_BYTES = 2 * BUFFER;

  u32x4* lds;
  int wave;
  Y y;
  u32 y_from, y_along, y_across;  // in memory and in LDS
  float row_lse, row_delta;       // of a row of the next tile

  struct Source {
    Walked y1, y2;
    const float *lse, *delta;  // dk, dv: of this batch element, [heads, length]
    int length;
  };
  GPU_FN bool second() const { return wave >= WAVES / 2; }  // brings y2
  GPU_FN void start_walked(u32 stride) {
    wave = int(gpu::wave());
    const u32 thread = gpu::thread() % Y::THREADS, matrix = second() ? 1 : 0;
    y_from = Y::source(thread, stride);
    y_along = Y::along(thread) + matrix * ALONG2, y_across = Y::across(thread) + ACROSS1 + matrix * BYTES;
  }
  // The first wave brings lse and delta of the rows.
  GPU_FN void fetch(const Source& from, const Walk& w) {
    const int head = w.fetched<KEYS>();
    const u32 stride = uniform_barrier(from.y1.stride);
    const Walked mine{second() ? from.y2.base : from.y1.base, stride, from.y1.bytes};
    y.load(mine.of_head(head, D * 2), y_from + u32(w.row) * stride, stride);
    if (KEYS && wave == 0) {
      const long at = (long)head * from.length;
      const u32 row = u32(gpu::min(w.row + int(fresh_lane() % ROWS), from.length - 1));
      row_lse = (from.lse + at)[row], row_delta = (from.delta + at)[row];
    }
  }
  GPU_FN void put(const Source& from, const Walk& w) {
    char* buffer = (char*)lds + u32(w.now) * BUFFER;
    y.store_along(buffer, y_along);
    if (KEYS || !second()) y.store_across(buffer, y_across);
    if (KEYS && wave == 0) {
      const u32 row = fresh_lane() % ROWS, in_tile = row % 16;
      // In the order in which lanes hold rows of a result: a lane's lie together.
      const u32 place = row - in_tile + (GPU_RDNA3 ? in_tile % 2 * 8 + in_tile / 2 : in_tile);
      const bool there = w.row + int(row) < from.length;
      float* stats = (float*)(buffer + STATS) + place;
      stats[0] = there ? (Narrow<T>::YES ? float(P_SHIFT) : 0.f) - row_lse * LOG2E : -NOTHING;
      stats[ROWS] = there ? -row_delta : 0.f;
    }
  }
  // lse or delta (`which`) of the rows that a lane has of a result.
  GPU_FN Acc stats_of(u32 buffer, int which, int part) const {
    const float* stats = (const float*)((const char*)lds + buffer + STATS) + which * ROWS + 16 * part;
    const float* mine = stats + fresh_lane() / 16 * ELEMENTS;
    Acc x;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e += 4) {
      const gpu::f32x4 v = gpu::load16<gpu::f32x4>(mine + e);
#pragma unroll
      for (int i = 0; i < 4; i++) x[e + i] = v[i];
    }
    return x;
  }
};

}  // namespace attention
