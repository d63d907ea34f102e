// The mask: query t has position i = cache_len + t and sees the keys j with doc_start[t] <= j <= i, and i - j < window
// where window > 0. `doc_start` never falls, so the range that a run of queries sees begins with its first query's and
// ends with its last query's.
#pragma once
#include "gpu.hpp"

namespace attention {

using gpu::u32;

constexpr float HIDDEN = -1e30f;  // finite: no infinity minus infinity

struct Mask {
  const int* doc_start;  // of this batch element, [queries]
  int queries, keys, cache_len, window;

  GPU_FN int clamp(int query) const { return query < queries ? query : queries - 1; }
  // First and last key of a query that exists.
  GPU_FN int first(int query) const {
    const int start = doc_start[query], index = cache_len + query;
    return window > 0 && index - window + 1 > start ? index - window + 1 : start;
  }
  GPU_FN int last(int query) const {
    const int index = cache_len + query;
    return index < keys ? index : keys - 1;
  }
};

// The keys [begin, end) that `count` queries from `first` on see among them, and those that each of them sees.
struct Seen {
  int begin, end, all_begin, all_end;

  GPU_FN Seen(const Mask& mask, int query, int count) {
    const int from = mask.clamp(query), to = mask.clamp(query + count - 1);
    begin = mask.first(from), end = query < mask.queries ? mask.last(to) + 1 : 0;
    all_begin = mask.first(to), all_end = mask.last(from) + 1;
  }
  // One comparison each: a number below the first of a range wraps around.
  GPU_FN bool touches(int key, int count) const {
    return u32(key + count - 1 - begin) < u32(gpu::max(end + count - 1 - begin, 0));
  }
  GPU_FN bool whole(int key, int count) const {
    return u32(key - all_begin) < u32(gpu::max(all_end - count + 1 - all_begin, 0));
  }
};

}  // namespace attention
