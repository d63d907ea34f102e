// Linear recurrences in chunks of 64 tokens, in float32: the parts that delta_rule.hip and ssd.hip share (gates of a
// chunk, layouts of arrays, matmuls with 64 x 64 results). In ssd.hip q, k, v and beta are C, B, x and dt.
//
//   qkv [batch, tokens, channels]: q and k of G key heads, v of all heads, in the order of `Layout`
//   g, beta [batch, tokens, heads] f32
//   info [planes, rows, chunks, 64], rows = batch * heads: running sums of g, their rounding rests, beta, and the
//       position in the chunk where the token's document starts (-1: before the chunk)
//   states [chunks, rows, keys, width]: the state before each chunk; dstates: the gradient of the state after each
//
// Matmuls: a work-group of 256 makes a tile of 64 x 64, 16 results per work-item; operands go through LDS, DEEP of the
// inner dimension at a time. CDNA uses its float32 matrix instructions, RDNA multiply-adds.
#pragma once
#include "elements.hpp"

using namespace gpu;

constexpr u32 CHUNK = 64, SQUARE = CHUNK * CHUNK, MOST_KEYS = 256;
// STRIDE: floats from row to row in LDS, chosen so that neither writes nor reads have bank conflicts.
constexpr u32 DEEP = GPU_CDNA ? 32 : 16, STRIDE = GPU_CDNA ? 65 : 68;
enum { SUMS, RESTS, BETA, START };  // planes of info

struct Sizes {
  const void* qkv;
  u32 batch, tokens, heads, key_heads, keys, width, at, chunks, types;
};
#define SIZES_ARGUMENTS                                                                                             \
  const void *qkv, u32 batch, u32 tokens, u32 heads, u32 key_heads, u32 keys, u32 width, u32 at, u32 chunks, u32 types
#define SIZES                                                                           \
  Sizes { qkv, batch, tokens, heads, key_heads, keys, width, at, chunks, types }

// A chunk's gates in LDS, one number per token.
struct Gates {
  float sums[CHUNK], rests[CHUNK], beta[CHUNK], start[CHUNK], inside[CHUNK], to_end[CHUNK];
};

// Where a token's channels of q, k and v begin.
enum class Layout { QKV, VKQ };

// One chunk of one head.
template <Layout LAYOUT>
struct ChunkOf {
  Sizes s;
  u32 head, chunk, count;  // of all batch heads; tokens that there are
  u64 row;                 // of the chunk's first token, in arrays [batch, tokens, ...]

  GPU_FN ChunkOf(const Sizes& sizes, u32 which_head, u32 which_chunk) : s(sizes), head(which_head), chunk(which_chunk) {
    u32 first = s.at + chunk * CHUNK;
    count = min(CHUNK, s.tokens - first);
    row = u64(head / s.heads) * s.tokens + first;
  }
  GPU_FN u32 rows() const { return s.batch * s.heads; }
  GPU_FN u64 number() const { return u64(head) * s.chunks + chunk; }
  GPU_FN u64 plane(u32 which, u32 i) const { return (u64(which) * rows() * s.chunks + number()) * CHUNK + i; }
  GPU_FN u64 key_at(u32 i, u32 d) const { return (number() * CHUNK + i) * s.keys + d; }
  GPU_FN u64 value_at(u32 which, u32 i, u32 c) const { return plane(which, i) * s.width + c; }
  GPU_FN u64 state_at(u32 slot, u32 d, u32 c) const { return ((u64(slot) * rows() + head) * s.keys + d) * s.width + c; }
  // Of gradients of q (which 0) and k (1) [rows, chunks, 64, 2, keys].
  GPU_FN u64 pair_at(u32 i, u32 which, u32 d) const { return key_at(i, 0) * 2 + which * s.keys + d; }
  GPU_FN u64 gate_at(u32 i) const { return (row + i) * s.heads + head % s.heads; }

  GPU_FN u32 key_width() const { return s.key_heads * s.keys; }
  GPU_FN u32 key_head() const { return head % s.heads / (s.heads / s.key_heads); }
  GPU_FN u32 first_query() const { return LAYOUT == Layout::QKV ? 0 : s.heads * s.width + key_width(); }
  GPU_FN u32 first_key() const { return LAYOUT == Layout::QKV ? key_width() : s.heads * s.width; }
  GPU_FN u32 first_value() const { return LAYOUT == Layout::QKV ? 2 * key_width() : 0; }
  GPU_FN u64 channel(u32 i, u32 c) const { return (row + i) * (2 * key_width() + s.heads * s.width) + c; }
  GPU_FN u64 value_channel(u32 i, u32 c) const { return channel(i, first_value() + head % s.heads * s.width + c); }
  // An element of q, k or v; 0 beyond the end.
  GPU_FN float part(u32 first, u32 i, u32 d, u32 end) const {
    float x = load(s.qkv, type_of(s.types, 0), channel(min(i, count - 1), first + min(d, end - 1)));
    return i < count && d < end ? x : 0.f;
  }
  GPU_FN float q(u32 i, u32 d) const { return part(first_query() + key_head() * s.keys, i, d, s.keys); }
  GPU_FN float k(u32 i, u32 d) const { return part(first_key() + key_head() * s.keys, i, d, s.keys); }
  GPU_FN float v(u32 i, u32 c) const { return part(first_value() + head % s.heads * s.width, i, c, s.width); }
  GPU_FN float dy(const void* p, u32 i, u32 c) const {
    u64 there = ((row + min(i, count - 1)) * s.heads + head % s.heads) * s.width + min(c, s.width - 1);
    float x = load(p, type_of(s.types, 1), there);
    return i < count && c < s.width ? x : 0.f;
  }
  // The share of token j's contribution that is left at token i; 0 unless j is an earlier token of i's document.
  GPU_FN float decay(const Gates& g, u32 i, u32 j) const {
    bool counts = j <= i && i < count && float(j) >= g.start[i];
    return counts ? gpu::exp(g.sums[i] - g.sums[j] + (g.rests[i] - g.rests[j])) : 0.f;
  }
  // inside: the share of the incoming state left at each token; to_end: the share of each token left at the chunk's
  // end.
  GPU_FN void finish_gates(Gates& g) const {
    barrier();
    u32 i = thread();
    if (i < CHUNK) {
      g.inside[i] = g.start[i] < 0.f ? gpu::exp(g.sums[i] + g.rests[i]) : 0.f;
      g.to_end[i] = decay(g, count - 1, i);
    }
    barrier();
  }
  // Reads the gates from the arguments and stores them in info.
  GPU_FN void make_gates(Gates& gates, const float* g, const float* beta, const int* doc_start, const int* cache_len,
                         float* info) const {
    u32 i = thread(), token = min(i, count - 1);
    if (i < CHUNK) {
      int start = doc_start[row + token] - cache_len[0] - int(s.at + chunk * CHUNK);
      gates.start[i] = float(max(min(start, int(CHUNK)), -1));
      gates.beta[i] = i < count ? beta[gate_at(token)] : 0.f;
      // g is split into a multiple of 2^-11, whose sums are exact, and a rest. exp(-128) is 0 in float32.
      float here = i < count ? max(g[gate_at(token)], -128.f) : 0.f;
      gates.to_end[i] = float(int(here * 2048.f)) / 2048.f;
      gates.inside[i] = here - gates.to_end[i];
    }
    barrier();
    if (i < CHUNK) {
      float sum = 0.f, rest = 0.f;
      for (u32 j = u32(max(gates.start[i], 0.f)); j <= i; j++) sum += gates.to_end[j], rest += gates.inside[j];
      gates.sums[i] = sum;
      gates.rests[i] = rest;
      info[plane(SUMS, i)] = sum;
      info[plane(RESTS, i)] = rest;
      info[plane(BETA, i)] = gates.beta[i];
      info[plane(START, i)] = gates.start[i];
    }
    finish_gates(gates);
  }
  // The sum over the heads that share a key head; this head is the first of them.
  GPU_FN float sum_heads(const float* dqk, u32 i, u32 which, u32 d) const {
    float sum = 0.f;
    for (u32 n = 0; n < s.heads / s.key_heads; n++) sum += dqk[pair_at(i, which, d) + u64(n) * s.chunks * CHUNK * 2 * s.keys];
    return sum;
  }
  GPU_FN void read_gates(Gates& g, const float* info, u32 i) const {
    g.sums[i] = info[plane(SUMS, i)];
    g.rests[i] = info[plane(RESTS, i)];
    g.beta[i] = info[plane(BETA, i)];
    g.start[i] = info[plane(START, i)];
  }
};

// ---- gradients of g -------------------------------------------------------------------------------------------------
// g of a token is part of every decay from an earlier token to it or to a later one. The gradients of those are added
// up directly; as a difference of prefix sums a small gradient would lose all its digits.
//
// to[token] += sum over n < token <= i of pair(i, n), the gradient of the logarithm of the decay from n to i.
// memory: LDS of a tile.
template <class F>
GPU_FN void add_pairs(float* memory, float* to, F pair) {
  constexpr u32 ROWS = CHUNK * CHUNK / 256, GROUPS = CHUNK / 16;
  u32 n = thread() % CHUNK, part = thread() / CHUNK;
  float below[ROWS], sum = 0.f;
#pragma unroll
  for (u32 i = ROWS; i-- > 0;) below[i] = sum += pair(part * ROWS + i, n);
  memory[thread()] = sum;
  float* sums = memory + 256;  // of rows, 16 columns each
  local_barrier();
  sum = 0.f;
  for (u32 p = part + 1; p < 256 / CHUNK; p++) sum += memory[p * CHUNK + n];
#pragma unroll
  for (u32 i = 0; i < ROWS; i++) {
    u32 row = part * ROWS + i;
    float x = row_reduce<16>(n < row ? below[i] + sum : 0.f, Sum{});
    if (n % 16 == 0) sums[n / 16 * (CHUNK + 1) + row] = x;
  }
  local_barrier();
  if (thread() < CHUNK)
    for (u32 i = 0; i < GROUPS; i++) to[thread()] += sums[i * (CHUNK + 1) + thread()];
}
// The gradient of a token's g. sums: from the pairs above and from the decay of the incoming state to each token;
// ends: from the decay of each token to the chunk's end; through: from the incoming state's decay to the chunk's end.
GPU_FN float gate_gradient(const float* sums, const float* ends, float through, u32 count) {
  u32 j = thread();
  for (u32 i = 0; i < count; i++) through += i < j ? ends[i] : sums[i];
  return through;
}

// ---- matmuls --------------------------------------------------------------------------------------------------------
enum Order { ALONG, ACROSS };
// A work-item's results at[j][i]: rows row() + i and columns column() + STEP j of a tile. memory: 2 DEEP STRIDE floats.
struct Tile {
  static constexpr u32 STEP = GPU_CDNA ? 16 : 1;
  f32x4 at[4];
  GPU_FN static u32 row() { return thread() / 16 * 4; }
  GPU_FN static u32 column() { return thread() % 16 * (GPU_CDNA ? 1 : 4); }
  GPU_FN Tile() {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) at[j][i] = 0.f;
  }
  // += sum over n < inner of left(row, n) right(n, column), which are 0 beyond their ends. A barrier() must already
  // separate this from what other work-items wrote to global memory. LEFT, RIGHT: ALONG where neighbors in memory
  // differ in n, ACROSS where they differ in the row (of the right operand: the column).
  template <Order LEFT, Order RIGHT, class L, class R>
  GPU_FN void add(float* memory, u32 inner, L left, R right) {
    float *a = memory, *b = memory + DEEP * STRIDE;
#pragma unroll 1
    for (u32 first = 0; first < inner; first += DEEP) {
      local_barrier();
      u32 own = optimization_barrier(thread());  // recomputed: kept through the loop, it makes registers spill
#pragma unroll
      for (u32 part = 0; part < DEEP * CHUNK / 256; part++) {
        u32 along = own % DEEP, wide = own / DEEP + part * (256 / DEEP);
        u32 deep = own / CHUNK + part * (256 / CHUNK), across = own % CHUNK;
        u32 n = LEFT == ALONG ? along : deep, i = LEFT == ALONG ? wide : across;
        a[n * STRIDE + i] = first + n < inner ? left(i, first + n) : 0.f;
        n = RIGHT == ALONG ? along : deep, i = RIGHT == ALONG ? wide : across;
        b[n * STRIDE + i] = first + n < inner ? right(first + n, i) : 0.f;
      }
      local_barrier();
      multiply(a, b);
    }
  }
#if GPU_CDNA
  // Rows 16 wave() + .. of the tile; of DEEP places, lanes of a row of 16 take every eighth of their own.
  GPU_FN void multiply(const float* a, const float* b) {
    u32 group = lane() / 16, across = lane() % 16;
    u32 first = (group % 2 * 16 + group / 2 * 8) * STRIDE + across;
#pragma unroll
    for (u32 n = 0; n < DEEP / 4; n++) {
      float l = a[first + n * STRIDE + 16 * wave()];
#pragma unroll
      for (u32 j = 0; j < 4; j++) at[j] = mfma_f32_16x16x4_f32(l, b[first + n * STRIDE + 16 * j], at[j]);
    }
  }
#else
  GPU_FN void multiply(const float* a, const float* b) {
#pragma unroll
    for (u32 n = 0; n < DEEP; n++) {
      f32x4 l = load16<f32x4>(a + n * STRIDE + row()), r = load16<f32x4>(b + n * STRIDE + column());
#pragma unroll
      for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) at[j][i] = gpu::fma(l[i], r[j], at[j][i]);
    }
  }
#endif
  // f(row, column, result) of each.
  template <class F>
  GPU_FN void each(F f) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 r = optimization_barrier(row() + i), c = optimization_barrier(column());
#pragma unroll
      for (u32 j = 0; j < 4; j++) f(r, c + STEP * j, at[j][i]);
      sched_fence();
    }
  }
  GPU_FN void scale_rows(const float* by) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) at[j][i] *= by[row() + i];
  }
  // sums[row] += the sum of f over a row; every work-item takes part, one writes.
  template <class F>
  GPU_FN void sum_rows(float* sums, F f) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 r = optimization_barrier(row() + i), c = optimization_barrier(column());
      float mine = 0.f;
#pragma unroll
      for (u32 j = 0; j < 4; j++) mine += f(r, c + STEP * j, at[j][i]);
      mine = row_reduce<16>(mine, Sum{});
      if (c == 0) sums[r] += mine;
      sched_fence();
    }
  }
};
#define TILE_MEMORY GPU_SHARED(float, memory, 2 * DEEP * STRIDE)

