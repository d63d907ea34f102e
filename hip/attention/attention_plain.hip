// Plain attention: o = softmax(scale q k^T) v over the keys j with doc_start[b, t] <= j <= cache_len + t (and i - j <
// window), lse = log of the softmax's denominator; and its gradient. The reference for the flash kernels,
// and the kernel for shapes that those do not support. Head width up to 512.
//   q, o, do, dq [B, T, H, D]; k, v, dk, dv [B, S, G, D]; doc_start [B, T] i32; cache_len [1] i32; lse, delta [B, H, T]
//   f32.
//   types: o, do, q, k, v, dq, dk, dv.
// With cap > 0 the scores s = scale q k are cap tanh(s / cap), and ds has the cap's derivative.
// delta = sum(do o); p = exp(scale q k - lse), ds = p (do v - delta) scale; dq = ds k, dk = ds^T q, dv = p^T do.
// Launch: work-groups of 256: forward, delta and dq one a query row (b, t, h); dkv one a key row (b, s, g). Keys (or
// queries) go through in tiles of 256: a work-item makes one score, then one column of the result.
// Source: Dao et al., FlashAttention (2022).
#include "elements.hpp"
#include "softcap.hpp"

using namespace gpu;

constexpr u32 TILE = 256, WIDEST = 512, COLUMNS = WIDEST / TILE;
constexpr float MASKED = -1e30f;


// [B, rows, heads, width]: where row (b, r, h) doc_start.
GPU_FN u64 row_at(u32 b, u32 r, u32 h, u32 rows, u32 heads, u32 width) {
  return ((u64(b) * rows + r) * heads + h) * width;
}
GPU_FN float dot(const float* fixed, const void* p, u32 type, u64 at, u32 width) {
  float sum = 0.f;
  for (u32 d = 0; d < width; d += 8) {
    float part = 0.f;
    for (u32 e = d; e < min(d + 8, width); e++) part += fixed[e] * load(p, type, at + e);
    sum += part;
  }
  return sum;
}
GPU_FN void fetch(float* to, const void* p, u32 type, u64 at, u32 width) {
  for (u32 d = thread(); d < width; d += TILE) to[d] = load(p, type, at + d);
}
GPU_FN float score_of(float s, float cap) { return cap > 0.f ? capped(s, cap) : s; }
GPU_FN float slope_of(float score, float cap) { return cap > 0.f ? cap_slope(score, cap) : 1.f; }
// First key that query i of a document from `start` sees.
GPU_FN u32 first_key(u32 start, u32 i, u32 window) {
  return window && i + 1 > window ? max(start, i + 1 - window) : start;
}

extern "C" GPU_KERNEL(256) void attention_plain(const void* q, const void* k, const void* v, const int* doc_start,
                                                const int* cache_len, void* o, float* lse, u32 queries, u32 keys,
                                                u32 heads, u32 kv_heads, u32 width, u32 window, u32 types,
                                                float scale, float cap) {
  GPU_SHARED(float, query, WIDEST);
  GPU_SHARED(float, weight, TILE);
  GPU_SHARED(float, memory, TILE / GPU_WAVE);
  u32 h = block_x() % heads, t = block_x() / heads % queries, b = block_x() / heads / queries;
  u32 g = h / (heads / kv_heads), i = u32(cache_len[0]) + t;
  u32 first = first_key(u32(doc_start[b * queries + t]), i, window), last = min(i + 1, keys);
  u64 own = row_at(b, t, h, queries, heads, width);
  fetch(query, q, type_of(types, 2), own, width);
  barrier();
  float top = MASKED, total = 0.f, sum[COLUMNS] = {};
  for (u32 tile = first; tile < last; tile += TILE) {
    u32 j = tile + thread(), count = min(TILE, last - tile);
    u64 at = row_at(b, j, g, keys, kv_heads, width);
    float score = j < last ? score_of(scale * dot(query, k, type_of(types, 3), at, width), cap) : MASKED;
    float higher = max(top, block_max<TILE>(score, memory)), keep = gpu::exp(top - higher);
    float p = j < last ? gpu::exp(score - higher) : 0.f;
    weight[thread()] = p;
    total = total * keep + block_sum<TILE>(p, memory);
    top = higher;
    barrier();
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) {
      u32 d = c * TILE + thread();
      float part = 0.f;
      for (u32 e = 0; e < count && d < width; e++)
        part += weight[e] * load(v, type_of(types, 4), row_at(b, tile + e, g, keys, kv_heads, width) + d);
      sum[c] = sum[c] * keep + part;
    }
    barrier();
  }
#pragma unroll
  for (u32 c = 0; c < COLUMNS; c++)
    if (u32 d = c * TILE + thread(); d < width) store(o, type_of(types, 0), own + d, sum[c] / total);
  if (thread() == 0) lse[(u64(b) * heads + h) * queries + t] = top + gpu::log(total);
}

extern "C" GPU_KERNEL(256) void attention_delta(const void* grad, const void* o, float* delta, u32 queries, u32 heads,
                                                u32 width, u32 types) {
  GPU_SHARED(float, memory, TILE / GPU_WAVE);
  u32 h = block_x() % heads, t = block_x() / heads % queries, b = block_x() / heads / queries;
  u64 own = row_at(b, t, h, queries, heads, width);
  float sum = 0.f;
  for (u32 d = thread(); d < width; d += TILE)
    sum += load(grad, type_of(types, 1), own + d) * load(o, type_of(types, 0), own + d);
  sum = block_sum<TILE>(sum, memory);
  if (thread() == 0) delta[(u64(b) * heads + h) * queries + t] = sum;
}

extern "C" GPU_KERNEL(256) void attention_plain_dq(const void* grad, const void* q, const void* k, const void* v,
                                                   const float* lse, const float* delta, const int* doc_start, void* dq,
                                                   u32 queries, u32 heads, u32 kv_heads, u32 width, u32 window,
                                                   u32 types, float scale, float cap) {
  GPU_SHARED(float, query, WIDEST);
  GPU_SHARED(float, gradient, WIDEST);
  GPU_SHARED(float, weight, TILE);
  u32 h = block_x() % heads, t = block_x() / heads % queries, b = block_x() / heads / queries;
  u32 g = h / (heads / kv_heads), first = first_key(u32(doc_start[b * queries + t]), t, window);
  u64 own = row_at(b, t, h, queries, heads, width), statistic = (u64(b) * heads + h) * queries + t;
  fetch(query, q, type_of(types, 2), own, width);
  fetch(gradient, grad, type_of(types, 1), own, width);
  barrier();
  float sum[COLUMNS] = {};
  for (u32 tile = first; tile <= t; tile += TILE) {
    u32 j = tile + thread(), count = min(TILE, t + 1 - tile);
    u64 at = row_at(b, min(j, t), g, queries, kv_heads, width);
    float score = score_of(scale * dot(query, k, type_of(types, 3), at, width), cap);
    float p = gpu::exp(score - lse[statistic]), slope = slope_of(score, cap);
    weight[thread()] = p * (dot(gradient, v, type_of(types, 4), at, width) - delta[statistic]) * scale * slope;
    barrier();
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) {
      u32 d = c * TILE + thread();
      float part = 0.f;
      for (u32 e = 0; e < count && d < width; e++)
        part += weight[e] * load(k, type_of(types, 3), row_at(b, tile + e, g, queries, kv_heads, width) + d);
      sum[c] += part;
    }
    barrier();
  }
#pragma unroll
  for (u32 c = 0; c < COLUMNS; c++)
    if (u32 d = c * TILE + thread(); d < width) store(dq, type_of(types, 5), own + d, sum[c]);
}

extern "C" GPU_KERNEL(256) void attention_plain_dkv(const void* grad, const void* q, const void* k, const void* v,
                                                    const float* lse, const float* delta, const int* doc_start, void* dk,
                                                    void* dv, u32 queries, u32 heads, u32 kv_heads, u32 width,
                                                    u32 window, u32 types, float scale, float cap) {
  GPU_SHARED(float, key, WIDEST);
  GPU_SHARED(float, value, WIDEST);
  GPU_SHARED(float, weight, TILE);
  GPU_SHARED(float, probability, TILE);
  u32 g = block_x() % kv_heads, j = block_x() / kv_heads % queries, b = block_x() / kv_heads / queries;
  u32 per = heads / kv_heads, last = window ? min(queries, j + window) : queries;
  u64 own = row_at(b, j, g, queries, kv_heads, width);
  fetch(key, k, type_of(types, 3), own, width);
  fetch(value, v, type_of(types, 4), own, width);
  barrier();
  float sum_k[COLUMNS] = {}, sum_v[COLUMNS] = {};
  for (u32 h = g * per; h < (g + 1) * per; h++) {
    for (u32 tile = j; tile < last; tile += TILE) {
      u32 t = tile + thread(), count = min(TILE, last - tile);
      float p = 0.f, ds = 0.f;
      if (t < last && u32(doc_start[b * queries + t]) <= j) {
        u64 at = row_at(b, t, h, queries, heads, width), statistic = (u64(b) * heads + h) * queries + t;
        float score = score_of(scale * dot(key, q, type_of(types, 2), at, width), cap);
        p = gpu::exp(score - lse[statistic]);
        ds = p * (dot(value, grad, type_of(types, 1), at, width) - delta[statistic]) * scale * slope_of(score, cap);
      }
      probability[thread()] = p, weight[thread()] = ds;
      barrier();
#pragma unroll
      for (u32 c = 0; c < COLUMNS; c++) {
        u32 d = c * TILE + thread();
        float part_k = 0.f, part_v = 0.f;
        for (u32 e = 0; e < count && d < width; e++) {
          u64 at = row_at(b, tile + e, h, queries, heads, width) + d;
          part_k += weight[e] * load(q, type_of(types, 2), at);
          part_v += probability[e] * load(grad, type_of(types, 1), at);
        }
        sum_k[c] += part_k, sum_v[c] += part_v;
      }
      barrier();
    }
  }
#pragma unroll
  for (u32 c = 0; c < COLUMNS; c++) {
    u32 d = c * TILE + thread();
    if (d >= width) continue;
    store(dk, type_of(types, 6), own + d, sum_k[c]);
    store(dv, type_of(types, 7), own + d, sum_v[c]);
  }
}
