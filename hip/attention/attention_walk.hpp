// Which rows attention's gradient walks over, and what each column sees of them.
//
// `doc_start` never falls, so the rows that a column sees are a range, for queries and keys alike: column c sees the
// rows [first, first + count).
#pragma once
#include "attention_mask.hpp"
#include "attention_matrix.hpp"
#include "attention_range.hpp"

namespace attention {

constexpr float LOG2E = 1.4426950408889634f, NOTHING = 1e30f;  // a lse that leaves no probability

// The lane's number, recomputed at each use rather than kept in a register.
GPU_FN u32 fresh_lane() { return optimization_barrier(gpu::lane()); }

struct Sizes {
  int length, heads, kv_heads, window;
};

// The rows that each column sees: [begin(c), end(c)), both rising with c.
template <bool KEYS>  // columns are keys, rows are queries; or the other way round
struct Sight {
  Mask mask;
  GPU_FN int begin(int c) const { return KEYS ? c : mask.first(c); }
  // Reads several queries at a time, as the latency of memory dominates. Most often the last one sees the key.
  GPU_FN int end(int c) const {
    if (!KEYS) return c + 1;
    constexpr int ASKED = 8;
    int low = c + 1, high = mask.queries;  // queries below `low` see key c, those from `high` on do not
    if (mask.first(high - 1) <= c) low = high;
    while (low < high) {
      const int step = (high - low + ASKED - 1) / ASKED;
      int seeing = 0;
#pragma unroll
      for (int i = 0; i < ASKED; i++) {
        const int query = low + i * step;
        seeing += query < high && mask.first(gpu::min(query, high - 1)) <= c ? 1 : 0;
      }
      high = gpu::min(high, low + seeing * step);
      if (seeing > 0) low += (seeing - 1) * step + 1;
    }
    return low;
  }
};
// Rows that `count` columns from `column` on see among them, and those that each of them sees.
struct Span {
  int begin, end, all_begin, all_end;
  template <bool KEYS>
  GPU_FN Span(const Sight<KEYS>& sight, int column, int count) {
    const int from = sight.mask.clamp(column), to = sight.mask.clamp(column + count - 1);
    begin = int(gpu::uniform(u32(sight.begin(from)))), end = int(gpu::uniform(u32(sight.end(to))));
    all_begin = int(gpu::uniform(u32(sight.begin(to)))), all_end = int(gpu::uniform(u32(sight.end(from))));
    if (column >= sight.mask.queries) end = begin;
  }
  GPU_FN bool touches(int row, int count) const { return row < end && row + count > begin; }
  GPU_FN bool whole(int row, int count) const { return row >= all_begin && row + count <= all_end; }
};

// One matrix that is walked: [length, heads, D] of one batch element.
struct Walked {
  const char* base;
  u32 stride, bytes;
  GPU_FN Rows of_head(int head, u32 head_bytes) const {
    return Rows(base + head * head_bytes, bytes - head * head_bytes);
  }
};

// What a kernel walks over: y1, y2; for dk and dv lse and delta of this batch element, [heads, length].
struct Source {
  Walked y1, y2;
  const float *lse, *delta;
  int length;
};

// Where a work-group stands: rows [row, row + ROWS) of `head`, in LDS buffer `now`; `next` is what comes then.
struct Walk {
  int row, head, begin, end, last_head, now;
  template <int ROWS>
  GPU_FN void step() {
    row += ROWS, now ^= 1;
    if (row >= end) row = begin, head++;
  }
  // The head to read from; there is none behind the last.
  template <bool MANY>
  GPU_FN int fetched() const { return MANY ? gpu::min(head, last_head) : last_head; }
  GPU_FN bool over() const { return head > last_head; }
};

// lse and delta of the ROWS rows of a tile, for dk and dv. One wave stores them in LDS in the order in which lanes hold
// rows of a result, so that a lane's are contiguous. LIFTS: delta is multiplied by `lift_delta`.
template <class T, int ROWS, bool LIFTS>
struct RowStats {
  float lse, delta;
  GPU_FN void fetch(const Source& from, int head, int row0) {
    const long at = (long)head * from.length;
    const u32 row = u32(gpu::min(row0 + int(fresh_lane() % ROWS), from.length - 1));
    lse = (from.lse + at)[row], delta = (from.delta + at)[row];
  }
  GPU_FN void put(float* stats, int row0, int length, float lift_delta) const {
    const u32 row = fresh_lane() % ROWS, in_tile = row % 16;
    const u32 place = row - in_tile + (GPU_RDNA3 ? in_tile % 2 * 8 + in_tile / 2 : in_tile);
    const bool there = row0 + int(row) < length;
    stats[place] = there ? (Narrow<T>::YES ? float(P_SHIFT) : 0.f) - lse * LOG2E : -NOTHING;
    stats[place + ROWS] = there ? -(LIFTS ? delta * lift_delta : delta) : 0.f;
  }
};
// lse or delta of the 16 rows at `rows` that a lane has of a result.
GPU_FN Acc stats_of(const float* rows) {
  const float* mine = rows + fresh_lane() / 16 * ELEMENTS;
  Acc x;
#pragma unroll
  for (int e = 0; e < ELEMENTS; e += 4) {
    const gpu::f32x4 v = gpu::load16<gpu::f32x4>(mine + e);
#pragma unroll
    for (int i = 0; i < 4; i++) x[e + i] = v[i];
  }
  return x;
}

}  // namespace attention
