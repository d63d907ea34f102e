// kv_append: cache[b, cache_len + t] = fresh[b, t]; positions past the cache's end are dropped.
// sample: the next token of each sequence from its logits: greedy, or temperature, top-k, top-p and min-p, then inverse
// transform sampling in id order; -1 where a logit is not finite.
// advance: the bookkeeping at the end of a decoding step (autograd/ops/decoding.py).
//   cache [B, S, row], fresh [B, T, row] f32, f16 or bf16 (types: cache, fresh), cache_len [1] i32; logits [B, V]
//   f32, uniform [B] f32 in [0, 1), settings [B, 4] f32 (temperature, top-k, top-p, min-p), id [B] i32.
// Nothing is sorted. Floats are compared by `rank`, an unsigned integer of the same order, and a threshold is found by
// bisection on its 32 bits: top-k: the largest rank that at least k tokens reach; top-p: the smallest rank whose
// strictly more probable tokens have less than top_p of the weight. So tokens of equal logits are kept or dropped
// together.
// Launch: kv_append (ceil(T row / 2048), B) work-groups of 256; sample B work-groups of 256, advance one.
// Sources: Fan et al., Hierarchical Neural Story Generation (2018); Holtzman et al., Neural Text Degeneration (2020).
#include "elements.hpp"

using namespace gpu;

// Gathers the keys (or values) of each row of a batch from its pages of 64 tokens, right-aligned in `length` = 64 width
// positions: out[b, length - 1 - places[b] + j] = pool[position j of row b], zeros before it; starts[b] is the first
// position used, end[0] the last. Launch: (ceil(length ceil(row / 8) / 256), 2 B) work-groups of 256: keys and values.
extern "C" GPU_KERNEL(256) void gather_pages(const void* keys, const void* values, const int* pages, const int* places,
                                             void* out_keys, void* out_values, int* starts, int* end, u32 width,
                                             u32 row, u32 type) {
  u32 chunks = (row + 7) / 8, item = block_x() * 256 + thread(), at = item / chunks, length = width * 64;
  u32 b = block_y() / 2, first = length - 1 - min(u32(max(places[b], 0)), length - 1), i = item % chunks * 8;
  bool of_keys = block_y() % 2 == 0;
  if (item == 0 && of_keys) {
    starts[b] = int(first);
    if (b == 0) end[0] = int(length) - 1;
  }
  if (at >= length) return;
  bool aligned = row % 8 == 0;
  Eight v = eight_zeros();
  if (at >= first) {
    u32 place = at - first;
    u64 from = (u64(pages[b * width + place / 64]) * 64 + place % 64) * row;
    v = load8(of_keys ? keys : values, type, from + i, from + row, aligned);
  }
  u64 to = (u64(b) * length + at) * row;
  store8(of_keys ? out_keys : out_values, type, to + i, to + row, v, aligned);
}

extern "C" GPU_KERNEL(256) void kv_append(void* cache, const void* fresh, const int* cache_len, u32 keys, u32 tokens,
                                          u32 row, u32 types) {
  u64 count = u64(tokens) * row, i = (u64(block_x()) * 256 + thread()) * 8;
  if (i >= count) return;
  u32 first = u32(cache_len[0]);
  u64 fits = first < keys ? min(count, u64(keys - first) * row) : u64(0);
  if (i >= fits) return;
  u64 from = block_y() * count, to = (u64(block_y()) * keys + first) * row;
  bool aligned = row % 8 == 0;
  Eight v = load8(fresh, type_of(types, 1), from + i, from + fits, aligned);
  store8(cache, type_of(types, 0), to + i, to + fits, v, aligned);
}

GPU_FN u32 rank(float x) {
  u32 bits = float_to_bits(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
GPU_FN float number(u32 r) { return bits_to_float(r & 0x80000000u ? r & 0x7fffffffu : ~r); }

struct Sampler {
  const float* logits;
  u32 count;
  float temperature;
  float* memory;
  bool aligned;

  // Weight of a token, 1 for the most probable; 0 below the rank `least`.
  GPU_FN float weight_of(float x, float top, u32 least) const {
    return rank(x) >= least ? gpu::exp((x - top) / temperature) : 0.f;
  }
  GPU_FN float weight(u32 i, float top, u32 least) const { return weight_of(logits[i], top, least); }
  // The sum of value(logit) over this work-item's tokens, eight at a time.
  template <class F>
  GPU_FN float over_mine(F value) const {
    float mine = 0.f;
    for (u32 i = thread() * 8; i < count; i += 2048) {
      Eight v = load8_of(logits, i, count, aligned);
#pragma unroll
      for (u32 e = 0; e < 8; e++) mine += i + e < count ? value(v.at[e]) : 0.f;
    }
    return block_sum<256>(mine, memory);
  }
  // The number of tokens whose rank is at least `least`; exact in float32, as there are fewer than 2^24.
  GPU_FN float reached(u32 least) const {
    return over_mine([least](float x) { return rank(x) >= least ? 1.f : 0.f; });
  }
  GPU_FN float weighs(float top, u32 least) const {
    return over_mine([this, top, least](float x) { return weight_of(x, top, least); });
  }
  // The largest rank that at least k tokens reach.
  GPU_FN u32 top_k_rank(u32 highest, u32 k) const {
    u32 low = 0, high = highest;
    while (low < high) {
      u32 middle = low + (high - low) / 2 + ((high - low) & 1);
      if (reached(middle) >= float(k)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // The smallest rank from `least` on such that the tokens above it have less than top_p of the weight.
  GPU_FN u32 top_p_rank(u32 highest, u32 least, float top_p) const {
    float top = number(highest), limit = top_p * weighs(top, least);
    u32 low = least, high = highest;  // nothing is above the highest
    while (low < high) {
      u32 middle = low + (high - low) / 2;
      if (weighs(top, max(middle + 1, least)) < limit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return high;
  }
};

// The highest rank and, of the ids that have it, the lowest.
GPU_FN u64 highest_key(const float* logits, u32 count, u64* keys, bool aligned) {
  u64 best = 0;
  for (u32 i = thread() * 8; i < count; i += 2048) {
    Eight v = load8_of(logits, i, count, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) best = max(best, i + e < count ? u64(rank(v.at[e])) << 32 | u32(~(i + e)) : u64(0));
  }
  best = wave_reduce(best, Max{});
  if (lane() == 0) keys[wave()] = best;
  barrier();
  for (u32 i = 0; i < 256 / GPU_WAVE; i++) best = max(best, keys[i]);
  return best;
}

// The id at which the running sum of weights reaches `wanted`; runs[] holds each work-item's sum over `run` ids.
GPU_FN u32 walk(const Sampler& s, const float* runs, u32 run, float uniform_number, float top, u32 least) {
  float total = 0.f, before = 0.f;
  for (u32 i = 0; i < 256; i++) total += runs[i];
  float wanted = uniform_number * total;
  u32 chosen = 0, token = 0;
  // Stops at the last run with any weight, as rounding may leave the number above the sum.
  for (u32 i = 0; i < 256; i++) {
    if (!(runs[i] > 0.f)) continue;
    chosen = i;
    if (before + runs[i] > wanted) break;
    before += runs[i];
  }
  for (u32 i = min(chosen * run, s.count); i < min(chosen * run + run, s.count); i++) {
    float w = s.weight(i, top, least);
    if (!(w > 0.f)) continue;
    token = i;
    before += w;
    if (before > wanted) break;
  }
  return token;
}

extern "C" GPU_KERNEL(256) void sample(const float* logits, const float* uniform_number, const float* settings, int* id,
                                       u32 count) {
  GPU_SHARED(u64, keys, 256 / GPU_WAVE);
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  GPU_SHARED(float, runs, 256);
  logits += u64(block_x()) * count;
  settings += block_x() * 4;
  float temperature = settings[0], top_p = settings[2], min_p = settings[3];
  u32 top_k = u32(settings[1]);
  bool aligned = count % 8 == 0;
  u64 key = highest_key(logits, count, keys, aligned);
  Sampler s{logits, count, temperature, memory, aligned};
  bool odd = s.over_mine([](float x) { return is_finite(x) ? 0.f : 1.f; }) > 0.f;
  if (odd || temperature == 0.f) {
    if (thread() == 0) id[block_x()] = odd ? -1 : int(~u32(key));
    return;
  }
  u32 highest = u32(key >> 32), least = 0;
  if (top_k > 0 && top_k < count) least = s.top_k_rank(highest, top_k);
  if (top_p < 1.f) least = s.top_p_rank(highest, least, top_p);
  float top = number(highest), mine = 0.f;
  if (min_p > 0.f) least = max(least, rank(top + temperature * gpu::log(min_p)));
  u32 run = (count + 255) / 256, first = min(thread() * run, count), last = min(first + run, count);
  for (u32 i = first; i < last; i++) mine += s.weight(i, top, least);
  runs[thread()] = mine;
  barrier();
  if (thread() == 0) id[block_x()] = int(walk(s, runs, run, uniform_number[block_x()], top, least));
}

extern "C" GPU_KERNEL(256) void advance(const int* drawn, const float* uniforms, int* tokens, int* step, int* ids,
                                        int* positions, int* cache_len, float* uniform, u32 steps, u32 rows) {
  u32 now = u32(step[0]);
  barrier();  // all have read it
  for (u32 row = thread(); row < rows; row += 256) {
    if (now < steps) tokens[u64(now) * rows + row] = drawn[row];
    if (now + 1 < steps) uniform[row] = uniforms[u64(now + 1) * rows + row];
    ids[row] = max(drawn[row], 0);
    positions[row] += 1;
  }
  if (thread() == 0) step[0] = int(now) + 1, cache_len[0] += 1;
}
