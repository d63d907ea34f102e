// Mamba-2's recurrence in chunks of 64 tokens, in float32; the formulas are in autograd/ops/ssd.py. q, k, v and beta of
// chunks.hpp are C, B, x and dt here.
//
//     system:    of each chunk: gates, scores = C B' decay, and what it adds to the state: (to_end B)' (dt x)
//     scan:      through the chunks of a segment: S = whole S + what the chunk adds
//     output:    y = inside C S + scores (dt x) + skip x
//     to_states: what each chunk adds to the gradient of the state before it: (inside C)' dy; then scan, last chunk
//     first grads:     gradients of x, B and C by head, of the gates and of skip;  channels: of B and C
//     step:      token by token, updating a state
//
// skip [heads] f32. Scratch arrays as in chunks.hpp, and plane 4 of info: the share of the incoming state left at each
// token; mats [rows, chunks, 64, 64]: scores.
// Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060).
#include "chunks.hpp"

enum { INSIDE = START + 1 };

struct Chunk : ChunkOf<Layout::VKQ> {
  using ChunkOf::ChunkOf;
  GPU_FN u64 score(u32 i, u32 j) const { return number() * SQUARE + i * CHUNK + j; }
  // The share of the state before the chunk that is left at its end.
  GPU_FN float whole(const float* info) const { return info[plane(INSIDE, count - 1)]; }
  GPU_FN void load_gates(Gates& g, const float* info) const {
    barrier();
    if (thread() < CHUNK) read_gates(g, info, thread());
    finish_gates(g);
  }
};

// ---- forward --------------------------------------------------------------------------------------------------------
// Launch: (chunks, rows) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_system(SIZES_ARGUMENTS, const float* g, const float* dt, const int* doc_start,
                                           const int* cache_len, float* info, float* mats, float* states) {
  TILE_MEMORY;
  GPU_SHARED(Gates, gates_of, 1);
  Gates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  c.make_gates(gates, g, dt, doc_start, cache_len, info);
  if (thread() < CHUNK) info[c.plane(INSIDE, thread())] = gates.inside[thread()];
  Tile scores;
  scores.add<ALONG, ALONG>(
      memory, keys, [&](u32 r, u32 d) { return c.q(r, d); }, [&](u32 d, u32 j) { return c.k(j, d); });
  scores.each([&](u32 r, u32 j, float x) { mats[c.score(r, j)] = x * c.decay(gates, r, j); });
  for (u32 first = 0; first < keys; first += CHUNK)
    for (u32 column = 0; column < width; column += CHUNK) {
      Tile added;
      added.add<ACROSS, ACROSS>(
          memory, CHUNK, [&](u32 d, u32 n) { return c.k(n, first + d) * gates.to_end[n]; },
          [&](u32 n, u32 j) { return gates.beta[n] * c.v(n, column + j); });
      added.each([&](u32 d, u32 j, float x) {
        if (first + d < keys && column + j < width) states[c.state_at(block_x(), first + d, column + j)] = x;
      });
    }
}

// states: holds what each chunk adds, and receives the state before the chunk; backward: the gradient of the state
// after it. before, saved, after [rows, keys, width]: the state before the first chunk (null: zeros), a copy of it to
// keep (or null), and the state after the last. before and after may be the same array. Launch: (ceil(keys width /
// 256), rows) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_scan(SIZES_ARGUMENTS, u32 backward, const float* info, float* states,
                                         const float* before, float* saved, float* after) {
  u32 e = block_x() * 256 + thread();
  if (e >= keys * width) return;
  u64 place = u64(block_y()) * keys * width + e;
  float state = before ? before[place] : 0.f;
  if (saved) saved[place] = state;
  for (u32 n = 0; n < chunks; n++) {
    const Chunk c(SIZES, block_y(), backward ? chunks - 1 - n : n);
    float* here = states + c.state_at(c.chunk, 0, e);
    float added = *here;
    *here = state;
    state = gpu::fma(c.whole(info), state, added);
  }
  after[place] = state;
}

// types: xbc, y. Launch: (chunks, rows, ceil(width / 64)) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_output(SIZES_ARGUMENTS, const float* info, const float* mats, const float* states,
                                           const float* skip, void* y) {
  TILE_MEMORY;
  GPU_SHARED(Gates, gates_of, 1);
  Gates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 column = block_z() * CHUNK, own = width - column;
  c.load_gates(gates, info);
  Tile tile;
  tile.add<ALONG, ACROSS>(
      memory, keys, [&](u32 r, u32 d) { return c.q(r, d) * gates.inside[r]; },
      [&](u32 d, u32 j) { return j < own ? states[c.state_at(block_x(), d, column + j)] : 0.f; });
  tile.add<ALONG, ACROSS>(
      memory, CHUNK, [&](u32 r, u32 n) { return mats[c.score(r, n)]; },
      [&](u32 n, u32 j) { return gates.beta[n] * c.v(n, column + j); });
  float direct = skip[c.head % heads];
  tile.each([&](u32 r, u32 j, float x) {
    if (r < c.count && j < own)
      store(y, type_of(types, 1), c.gate_at(r) * width + column + j, gpu::fma(direct, c.v(r, column + j), x));
  });
}

// Token by token: S = exp(g) S + B (dt x)', y = S' C + skip x. types: xbc, y. Launch: (ceil(width / 64), rows)
// work-groups of 256; four work-items share a column of the state.
extern "C" GPU_KERNEL(256) void ssd_step(SIZES_ARGUMENTS, const float* g, const float* dt, const int* doc_start,
                                         const int* cache_len, const float* skip, float* state, void* y) {
  GPU_SHARED(float, c_of, MOST_KEYS);
  GPU_SHARED(float, b_of, MOST_KEYS);
  const Chunk c(SIZES, block_y(), 0);
  u32 column = block_x() * CHUNK + thread() / 4, safe = min(column, width - 1);
  for (u32 t = 0; t < tokens; t++) {
    barrier();
    if (thread() < keys) {
      c_of[thread()] = c.q(t, thread());
      b_of[thread()] = c.k(t, thread());
    }
    barrier();
    // The first token of a document starts from zeros; a token before its document's start leaves no state.
    int position = cache_len[0] + int(t), begins = doc_start[c.row + t];
    float kept = gpu::exp(g[c.gate_at(t)]), x = c.v(t, safe), sum = 0.f;
    float added = begins <= position ? dt[c.gate_at(t)] * x : 0.f;
    for (u32 d = thread() % 4; d < keys; d += 4) {
      u64 here = c.state_at(0, d, safe);
      float now = (begins < position ? kept * state[here] : 0.f) + b_of[d] * added;
      sum += c_of[d] * now;
      if (column < width) state[here] = now;
    }
    sum = row_reduce<4>(sum, Sum{});
    if (thread() % 4 == 0 && column < width)
      store(y, type_of(types, 1), c.gate_at(t) * width + column, gpu::fma(skip[c.head % heads], x, sum));
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// dstates: what each chunk adds. types: xbc, dy. Launch: (chunks, rows, ceil(width / 64)) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_to_states(SIZES_ARGUMENTS, const float* info, const void* dy, float* dstates) {
  TILE_MEMORY;
  GPU_SHARED(Gates, gates_of, 1);
  Gates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 column = block_z() * CHUNK, own = width - column;
  c.load_gates(gates, info);
  for (u32 first = 0; first < keys; first += CHUNK) {
    Tile grad;
    grad.add<ACROSS, ACROSS>(
        memory, CHUNK, [&](u32 d, u32 n) { return c.q(n, first + d) * gates.inside[n]; },
        [&](u32 n, u32 j) { return c.dy(dy, n, column + j); });
    grad.each([&](u32 d, u32 j, float x) {
      if (first + d < keys && j < own) dstates[c.state_at(block_x(), first + d, column + j)] = x;
    });
  }
}

// dxbc: receives the gradient of x. dcb f32 [rows, chunks, 64, 2, keys]: gradients of C and B by head; dg, ddt, dskip
// [batch, tokens, heads] f32.
// types: xbc, dy. Launch: (chunks, rows) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_grads(SIZES_ARGUMENTS, const float* info, const float* mats, const float* states,
                                          const float* dstates, const void* dy, const float* skip, float* dcb, void* dxbc,
                                          float* dg, float* ddt, float* dskip) {
  constexpr u32 ROW = CHUNK + 1;
  TILE_MEMORY;
  GPU_SHARED(Gates, gates_of, 1);
  GPU_SHARED(float, of_scores, CHUNK * ROW);
  GPU_SHARED(float, pairs, CHUNK);
  GPU_SHARED(float, sums, CHUNK);
  GPU_SHARED(float, ends, CHUNK);
  GPU_SHARED(float, by_dt, CHUNK);
  GPU_SHARED(float, by_skip, CHUNK);
  GPU_SHARED(float, totals, 256 / GPU_WAVE);
  Gates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 slot = block_x();
  c.load_gates(gates, info);
  if (thread() < CHUNK) pairs[thread()] = sums[thread()] = ends[thread()] = by_dt[thread()] = by_skip[thread()] = 0.f;
  barrier();
  float direct = skip[c.head % heads];
  for (u32 first = 0; first < width; first += CHUNK) {
    Tile added;  // the gradient of dt x
    added.add<ACROSS, ACROSS>(
        memory, CHUNK, [&](u32 r, u32 n) { return mats[c.score(n, r)]; },
        [&](u32 n, u32 j) { return c.dy(dy, n, first + j); });
    added.add<ALONG, ACROSS>(
        memory, keys, [&](u32 r, u32 d) { return c.k(r, d) * gates.to_end[r]; },
        [&](u32 d, u32 j) { return first + j < width ? dstates[c.state_at(slot, d, first + j)] : 0.f; });
    added.each([&](u32 r, u32 j, float x) {
      if (r < c.count && first + j < width)
        store(dxbc, type_of(types, 0), c.value_channel(r, first + j),
              gpu::fma(direct, c.dy(dy, r, first + j), gates.beta[r] * x));
    });
    added.sum_rows(by_dt, [&](u32 r, u32 j, float x) { return x * c.v(r, first + j); });
    added.sum_rows(by_skip, [&](u32 r, u32 j, float) { return c.dy(dy, r, first + j) * c.v(r, first + j); });
  }
  Tile scores;
  scores.add<ALONG, ALONG>(
      memory, width, [&](u32 r, u32 n) { return c.dy(dy, r, n); },
      [&](u32 n, u32 j) { return gates.beta[j] * c.v(j, n); });
  scores.each([&](u32 r, u32 j, float x) { of_scores[r * ROW + j] = x; });
  barrier();
  add_pairs(memory, pairs, [&](u32 i, u32 n) { return of_scores[i * ROW + n] * mats[c.score(i, n)]; });
  barrier();
  for (u32 e = thread(); e < SQUARE; e += 256) of_scores[e / CHUNK * ROW + e % CHUNK] *= c.decay(gates, e / CHUNK, e % CHUNK);
  barrier();
  for (u32 first = 0; first < keys; first += CHUNK) {
    Tile dc;
    dc.add<ALONG, ALONG>(
        memory, width, [&](u32 r, u32 n) { return c.dy(dy, r, n); },
        [&](u32 n, u32 d) { return first + d < keys ? states[c.state_at(slot, first + d, n)] : 0.f; });
    dc.scale_rows(gates.inside);
    dc.sum_rows(sums, [&](u32 r, u32 d, float x) { return c.q(r, first + d) * x; });
    dc.add<ALONG, ACROSS>(
        memory, CHUNK, [&](u32 r, u32 n) { return of_scores[r * ROW + n]; },
        [&](u32 n, u32 d) { return c.k(n, first + d); });
    dc.each([&](u32 r, u32 d, float x) {
      if (first + d < keys) dcb[c.pair_at(r, 0, first + d)] = x;
    });
    Tile db;
    db.add<ALONG, ALONG>(
        memory, width, [&](u32 r, u32 n) { return gates.beta[r] * c.v(r, n); },
        [&](u32 n, u32 d) { return first + d < keys ? dstates[c.state_at(slot, first + d, n)] : 0.f; });
    db.scale_rows(gates.to_end);
    db.sum_rows(ends, [&](u32 r, u32 d, float x) { return c.k(r, first + d) * x; });
    db.add<ACROSS, ACROSS>(
        memory, CHUNK, [&](u32 r, u32 n) { return of_scores[n * ROW + r]; },
        [&](u32 n, u32 d) { return c.q(n, first + d); });
    db.each([&](u32 r, u32 d, float x) {
      if (first + d < keys) dcb[c.pair_at(r, 1, first + d)] = x;
    });
  }
  float total = 0.f;
  for (u32 e = thread(); e < keys * width; e += 256)
    total += states[c.state_at(slot, 0, e)] * dstates[c.state_at(slot, 0, e)];
  total = block_sum<256>(total, totals);
  if (thread() < c.count) {
    u32 j = thread();
    dg[c.gate_at(j)] = pairs[j] + gate_gradient(sums, ends, gates.inside[c.count - 1] * total, c.count);
    ddt[c.gate_at(j)] = by_dt[j];
    dskip[c.gate_at(j)] = by_skip[j];
  }
}

// dxbc: receives the gradients of B and C, summed over the heads that share them. Launch: (tokens of the segment,
// batch) work-groups of 256.
extern "C" GPU_KERNEL(256) void ssd_channels(SIZES_ARGUMENTS, const float* dcb, void* dxbc) {
  u32 i = block_x() % CHUNK;
  for (u32 n = thread(); n < 2 * key_heads * keys; n += 256) {
    u32 part = n / keys, which = part / key_heads, d = n % keys;
    const Chunk c(SIZES, block_y() * heads + part % key_heads * (heads / key_heads), block_x() / CHUNK);
    u32 first = which == 0 ? c.first_query() : c.first_key();
    store(dxbc, type_of(types, 0), c.channel(i, first + part % key_heads * keys + d), c.sum_heads(dcb, i, which, d));
  }
}
