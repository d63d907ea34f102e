// A mixture of experts without its GEMMs (autograd/ops/routing.py): the router, sorting slots by expert, and combining
// experts' outputs by token.
//
// Slot t k + j is token t's j-th expert. Rows are sorted by expert, and within an expert by slot, so results do not
// depend on the order of work-groups. Types: four bits for each array, in the arguments' order.
// Sources: Shazeer et al., Outrageously Large Neural Networks (2017); Fedus et al., Switch Transformers (2022).
#include "elements.hpp"

using namespace gpu;

constexpr u32 MOST_EXPERTS = 1024, SLOTS = 256;  // SLOTS: a work-group's

// ---- the router: one wave per token
// -------------------------------------------------------------------------------------- An unsigned integer that rises
// with the float; both zeros have one.
GPU_FN u32 rank(float x) {
  u32 bits = float_to_bits(x == 0.f ? 0.f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Logits {
  const void* data;
  u32 type, experts;
  u64 first;
  GPU_FN float at(u32 expert) const { return load(data, type, first + expert); }
  GPU_FN float highest() const {
    float most = -__builtin_inff();
    for (u32 e = lane(); e < experts; e += GPU_WAVE) most = max(most, at(e));
    return wave_max(most);
  }
  // The sum of exp(logit - highest).
  GPU_FN float total(float top) const {
    float sum = 0.f;
    for (u32 e = lane(); e < experts; e += GPU_WAVE) sum += gpu::exp(at(e) - top);
    return wave_sum(sum);
  }
};

// weights, ids [tokens, chosen]: of the largest logits, or where `by` [tokens, experts] is largest; the lower id first.
// Launch: ceil(tokens / waves) work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_route(const void* logits, float* weights, int* ids, const float* by, u32 tokens,
                                          u32 experts, u32 chosen, u32 normalize, u32 type) {
  u32 token = block_x() * (256 / GPU_WAVE) + wave();
  if (token >= tokens) return;
  Logits l{logits, type, experts, u64(token) * experts};
  float top = l.highest(), low = 0.f, high = 0.f;  // of the choices of this lane's number, and 64 (32) higher
  u64 last = ~u64(0);                              // what was chosen before has a larger key
  for (u32 j = 0; j < chosen; j++) {
    u64 best = 0;
    for (u32 e = lane(); e < experts; e += GPU_WAVE) {
      u64 key = u64(rank(by ? by[l.first + e] : l.at(e))) << 32 | u32(~e);
      best = max(best, key < last ? key : u64(0));
    }
    last = wave_reduce(best, Max{});
    u32 id = ~u32(last);
    float x = gpu::exp(l.at(min(id, experts - 1)) - top);
    if (lane() == j % GPU_WAVE) {
      ids[u64(token) * chosen + j] = int(id);
      if (j < GPU_WAVE) {
        low = x;
      } else {
        high = x;
      }
    }
  }
  float total = normalize ? wave_sum(low + high) : l.total(top);
  for (u32 j = lane(); j < chosen; j += GPU_WAVE) weights[u64(token) * chosen + j] = (j < GPU_WAVE ? low : high) / total;
}

// dlogits [tokens, experts] = p (dweights - sum p dweights), p the softmax of all logits, or of those of `ids` alone.
extern "C" GPU_KERNEL(256) void moe_route_backward(const void* logits, const float* dweights, const int* ids,
                                                   void* dlogits, u32 tokens, u32 experts, u32 chosen, u32 normalize,
                                                   u32 type) {
  u32 token = block_x() * (256 / GPU_WAVE) + wave();
  if (token >= tokens) return;
  Logits l{logits, type, experts, u64(token) * experts};
  dweights += u64(token) * chosen;
  ids += u64(token) * chosen;
  float top = l.highest(), of_chosen = 0.f, dot = 0.f;
  for (u32 j = lane(); j < chosen; j += GPU_WAVE) {
    float e = gpu::exp(l.at(u32(ids[j])) - top);
    of_chosen += e;
    dot += e * dweights[j];
  }
  float total = normalize ? wave_sum(of_chosen) : l.total(top);
  dot = wave_sum(dot) / total;
  for (u32 e = lane(); e < experts; e += GPU_WAVE) {
    float grad = 0.f;
    bool taken = false;
    for (u32 j = 0; j < chosen; j++) {
      bool same = u32(ids[j]) == e;
      taken = taken || same;
      grad = same ? dweights[j] : grad;
    }
    float p = gpu::exp(l.at(e) - top) / total;
    store(dlogits, type, l.first + e, normalize && !taken ? 0.f : p * (grad - dot));
  }
}

// ---- slots by expert: count, scan, scatter
// --------------------------------------------------------------------------- The id of this work-item's slot, and how
// many of the work-group's slots before it and behind it have the same.
struct Slot {
  u32 id, before, behind;
  bool there;
};
GPU_FN Slot slot_of(const int* ids, u32 slots, u32* shared) {
  u32 at = block_x() * SLOTS + thread(), here = min(slots - block_x() * SLOTS, SLOTS);
  Slot s{at < slots ? u32(ids[at]) : ~0u, 0, 0, at < slots};
  shared[thread()] = s.id;
  barrier();
  for (u32 i = 0; i < here; i++) {
    bool same = shared[i] == s.id;
    s.before += same && i < thread() ? 1 : 0;
    s.behind += same && i > thread() ? 1 : 0;
  }
  return s;
}

// counts [experts, chunks]: slots of each expert among SLOTS of them. Launch: chunks work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_count(const int* ids, u32* counts, u32 slots, u32 experts, u32 chunks) {
  GPU_SHARED(u32, shared, SLOTS);
  GPU_SHARED(u32, found, MOST_EXPERTS);
  for (u32 e = thread(); e < experts; e += 256) found[e] = 0;
  Slot s = slot_of(ids, slots, shared);
  if (s.there && s.behind == 0) found[s.id] = s.before + 1;
  barrier();
  for (u32 e = thread(); e < experts; e += 256) counts[u64(e) * chunks + block_x()] = found[e];
}

// The sum of the numbers of the work-items before this one, and of all. `shared`: 256 numbers.
struct Before {
  u32 sum, all;
};
GPU_FN Before before(u32 mine, u32* shared) {
  Before b{0, 0};
  shared[thread()] = mine;
  barrier();
  for (u32 i = 0; i < 256; i++) {
    b.sum += i < thread() ? shared[i] : 0;
    b.all += shared[i];
  }
  return b;
}

// counts -> those of the chunks before; totals [experts]. Launch: experts work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_scan(u32* counts, u32* totals, u32 chunks) {
  GPU_SHARED(u32, shared, 256);
  counts += u64(block_x()) * chunks;
  u32 run = (chunks + 255) / 256, first = min(thread() * run, chunks), last = min(first + run, chunks), mine = 0;
  for (u32 i = first; i < last; i++) mine += counts[i];
  Before b = before(mine, shared);
  for (u32 i = first; i < last; i++) {
    u32 count = counts[i];
    counts[i] = b.sum;
    b.sum += count;
  }
  if (thread() == 0) totals[block_x()] = b.all;
}

// start [experts + 1], order [slots], place [slots] as of `Groups`. Launch: chunks work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_scatter(const int* ids, const u32* counts, const u32* totals, int* start, int* order,
                                            int* place, u32 slots, u32 experts, u32 chunks) {
  GPU_SHARED(u32, shared, SLOTS);
  GPU_SHARED(u32, starts, MOST_EXPERTS);
  u32 run = (experts + 255) / 256, first = min(thread() * run, experts), last = min(first + run, experts), mine = 0;
  for (u32 e = first; e < last; e++) mine += totals[e];
  Before b = before(mine, shared);
  for (u32 e = first; e < last; e++) {
    starts[e] = b.sum;
    if (block_x() == 0) start[e] = int(b.sum);
    b.sum += totals[e];
  }
  if (block_x() == 0 && thread() == 0) start[experts] = int(slots);
  barrier();  // all have read `shared`, and `starts` is written
  Slot s = slot_of(ids, slots, shared);
  if (!s.there) return;
  u32 at = block_x() * SLOTS + thread(), row = starts[s.id] + counts[u64(s.id) * chunks + block_x()] + s.before;
  order[row] = int(at);
  place[at] = int(row);
}

// ---- rows
// ------------------------------------------------------------------------------------------------------------ out
// [slots, columns]: row order[s] / chosen of x. Launch: ceil(slots ceil(columns / 8) / 256) work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_take(const void* x, const int* order, void* out, u32 slots, u32 columns, u32 chosen,
                                         u32 type) {
  u32 chunks = (columns + 7) / 8;
  u64 item = u64(block_x()) * 256 + thread();
  u32 row = u32(item / chunks), i = u32(item % chunks) * 8;
  if (row >= slots) return;
  bool aligned = columns % 8 == 0;
  u64 from = u64(u32(order[row]) / chosen) * columns, to = u64(row) * columns;
  store8(out, type, to + i, to + columns, load8(x, type, from + i, from + columns, aligned), aligned);
}

// out [tokens, columns]: each token's rows of y at its places, by their weights where there are any, added up, +
// residual. types: y, residual, out. Launch: ceil(tokens ceil(columns / 8) / 256) work-groups of 256.
extern "C" GPU_KERNEL(256) void moe_combine(const void* y, const int* place, const float* weights, const void* residual,
                                            void* out, u32 tokens, u32 columns, u32 chosen, u32 types) {
  u32 chunks = (columns + 7) / 8;
  u64 item = u64(block_x()) * 256 + thread();
  u32 token = u32(item / chunks), i = u32(item % chunks) * 8;
  if (token >= tokens) return;
  bool aligned = columns % 8 == 0;
  u64 at = u64(token) * columns;
  Eight sum = eight_zeros();
  for (u32 j = 0; j < chosen; j++) {
    u64 from = u64(u32(place[u64(token) * chosen + j])) * columns;
    float weight = weights ? weights[u64(token) * chosen + j] : 1.f;
    Eight v = load8(y, type_of(types, 0), from + i, from + columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum.at[e] += weight * v.at[e];
  }
  if (residual) {
    Eight v = load8(residual, type_of(types, 1), at + i, at + columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum.at[e] += v.at[e];
  }
  store8(out, type_of(types, 2), at + i, at + columns, sum, aligned);
}

// The gradients of y [rows, columns] and weights [rows], which are numbered by slot. types: dsum, y. One wave per row.
extern "C" GPU_KERNEL(256) void moe_combine_backward(const void* dsum, const void* y, const int* order,
                                                     const float* weights, void* dy, float* dweights, u32 rows,
                                                     u32 columns, u32 chosen, u32 types) {
  u32 row = block_x() * (256 / GPU_WAVE) + wave();
  if (row >= rows) return;
  bool aligned = columns % 8 == 0;
  u32 slot = u32(order[row]);
  u64 from = u64(slot / chosen) * columns, at = u64(row) * columns;
  float weight = weights[slot], dot = 0.f;
  for (u32 i = lane() * 8; i < columns; i += GPU_WAVE * 8) {
    Eight grad = load8(dsum, type_of(types, 0), from + i, from + columns, aligned);
    Eight v = load8(y, type_of(types, 1), at + i, at + columns, aligned);
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      dot += grad.at[e] * v.at[e];
      grad.at[e] *= weight;
    }
    store8(dy, type_of(types, 1), at + i, at + columns, grad, aligned);
  }
  dot = wave_sum(dot);
  if (lane() == 0) dweights[slot] = dot;
}
