// rope: y[n, h] = (a cos - b sin, b cos + a sin) with a, b the halves of x[n, h] and the row positions[n] of the
// tables; with `inverse` sin is negated. rope_append: rotated new keys, and new values, appended to their caches: with
// n = b tokens + t, keys[b, cache_len + t, g] = rope(k)[n, g] and values[b, cache_len + t, g] = v[n, g]; positions past
// a cache's end are dropped. paged_append: the same into pages of 64 tokens: token n goes to places[n] of row
// n / tokens, in its page pages[row, places[n] / 64]; rotated by the row places[n] of the tables, or as it is. A place
// that is negative (no token: `rope` takes row 0 for it), or beyond the row's pages, is left out.
//   x, y [N, H, 2 half] (types: x, y); k, v [N, G, 2 half], keys, values [B, length, G, 2 half] of one type: f32, f16
//   or bf16; cos, sin [P, half] f32; positions [N], cache_len [1] i32.
// Launch: ceil(N H ceil(half / 8) / 256) work-groups of 256, 8 pairs per work-item; the appends take two rows of them:
// keys, values. Less than 2^32 work-items along x.
// Source: Su et al., RoFormer (2021), with the halves paired as in LLaMA's Hugging Face form.
#include "elements.hpp"

using namespace gpu;

// Eight pairs of a row [2 half] of heads.
struct Pairs {
  Eight left, right;
};
// A work-item's place in a row: of the pairs `first` to `middle` and `middle` to `end`, those from i on.
struct Place {
  u64 first, middle, end;
  u32 i;
  bool aligned;
  GPU_FN Place(u64 row, u32 half_width, u32 i)
      : first(row * 2 * half_width),
        middle(first + half_width),
        end(middle + half_width),
        i(i),
        aligned(half_width % 8 == 0) {}
  GPU_FN Pairs load(const void* p, u32 type) const {
    return {load8(p, type, first + i, middle, aligned), load8(p, type, middle + i, end, aligned)};
  }
  GPU_FN void store(void* p, u32 type, const Pairs& v) const {
    store8(p, type, first + i, middle, v.left, aligned);
    store8(p, type, middle + i, end, v.right, aligned);
  }
};

GPU_FN Pairs rotated(const Pairs& x, const Eight& c, const Eight& s, bool inverse) {
  Pairs y;
#pragma unroll
  for (u32 e = 0; e < 8; e++) {
    float sine = inverse ? -s.at[e] : s.at[e];
    y.left.at[e] = x.left.at[e] * c.at[e] - x.right.at[e] * sine;
    y.right.at[e] = x.right.at[e] * c.at[e] + x.left.at[e] * sine;
  }
  return y;
}

extern "C" GPU_KERNEL(256) void rope(const void* x, const float* cosines, const float* sines, const int* positions,
                                     void* y, u32 rows, u32 heads, u32 half_width, u32 inverse, u32 types) {
  // 32-bit numbers: the remainder of 64-bit ones is a long loop.
  u32 chunks = (half_width + 7) / 8, item = block_x() * 256 + thread(), row = item / chunks;
  if (row >= rows) return;
  Place place(row, half_width, item % chunks * 8);
  u64 table = u64(max(positions[row / heads], 0)) * half_width, end = table + half_width;
  Eight c = load8(cosines, F32, table + place.i, end, place.aligned);
  Eight s = load8(sines, F32, table + place.i, end, place.aligned);
  place.store(y, type_of(types, 1), rotated(place.load(x, type_of(types, 0)), c, s, inverse));
}

extern "C" GPU_KERNEL(256) void rope_append(const void* k, const void* v, const float* cosines, const float* sines,
                                            const int* positions, const int* cache_len, void* keys, void* values,
                                            u32 rows, u32 groups, u32 half_width, u32 tokens, u32 length, u32 type) {
  u32 chunks = (half_width + 7) / 8, item = block_x() * 256 + thread(), row = item / chunks;
  if (row >= rows) return;
  u32 n = row / groups, key = u32(cache_len[0]) + n % tokens, i = item % chunks * 8;
  if (key >= length) return;
  Place from(row, half_width, i), to((u64(n / tokens) * length + key) * groups + row % groups, half_width, i);
  bool of_keys = block_y() == 0;  // the same for all lanes: one load and one store serve both
  Pairs pairs = from.load(of_keys ? k : v, type);
  if (of_keys) {
    u64 table = u64(positions[n]) * half_width, end = table + half_width;
    Eight c = load8(cosines, F32, table + i, end, from.aligned), s = load8(sines, F32, table + i, end, from.aligned);
    pairs = rotated(pairs, c, s, false);
  }
  to.store(of_keys ? keys : values, type, pairs);
}

extern "C" GPU_KERNEL(256) void paged_append(const void* k, const void* v, const float* cosines, const float* sines,
                                             const int* pages, const int* places, void* keys, void* values, u32 rows,
                                             u32 groups, u32 half_width, u32 tokens, u32 width, u32 rotates, u32 type) {
  u32 chunks = (half_width + 7) / 8, item = block_x() * 256 + thread(), row = item / chunks;
  if (row >= rows) return;
  u32 n = row / groups, i = item % chunks * 8;
  int place = places[n];
  if (place < 0 || u32(place) / 64 >= width) return;
  u64 slot = u64(pages[n / tokens * width + u32(place) / 64]) * 64 + u32(place) % 64;
  Place from(row, half_width, i), to(slot * groups + row % groups, half_width, i);
  bool of_keys = block_y() == 0;
  Pairs pairs = from.load(of_keys ? k : v, type);
  if (of_keys && rotates) {
    u64 table = u64(place) * half_width, end = table + half_width;
    Eight c = load8(cosines, F32, table + i, end, from.aligned), s = load8(sines, F32, table + i, end, from.aligned);
    pairs = rotated(pairs, c, s, false);
  }
  to.store(of_keys ? keys : values, type, pairs);
}
