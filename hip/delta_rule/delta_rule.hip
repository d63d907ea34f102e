// The gated delta rule in chunks of 64 tokens, in float32; the formulas are in autograd/ops/delta_rule.py.
//
//     system:        of each chunk: gates, N = k k' decay below the diagonal, X = inverse(1 + beta N),
//                    scores = q k' decay, X beta inside k, X beta v
//     scan:          over a segment's chunks: new = X beta v - (X beta inside k) S; S = whole S + (to_end k)' new
//     output:        y = inside q S + scores new
//     scan_backward: from the last chunk on: dnew = scores' dy + to_end k dS;
//                    dS = whole dS + (inside q)' dy - (X beta inside k)' dnew
//     grads:         gradients of normalized q and k, of v and of the gates;  channels: of q and k before normalization
//     step:          token by token, updating a state
//
// qkv [batch, tokens, channels] and scratch arrays as in chunks.hpp, and
//   planes 4 and 5 of info: 1 / |q| (times the scale) and 1 / |k|; mats [rows, chunks, 3, 64, 64]: X, N, scores
//   decayed [rows, chunks, 64, keys]: X beta inside k; values [2, rows, chunks, 64, width]: new, and its gradient
// Sources: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464); Yang et al. (arXiv 2406.06484).
#include "chunks.hpp"

constexpr float EPS = 1e-6f;
constexpr u32 INVERSE_ROW = 72;  // floats per row of the inverse in LDS: four rows of a column are in different banks
enum { INVERSE, SYSTEM, SCORES };
enum { Q_UNIT = START + 1, K_UNIT };

#define DELTA_ARGUMENTS SIZES_ARGUMENTS, float scale

struct UnitGates : Gates {
  float q_unit[CHUNK], k_unit[CHUNK];
};

struct Chunk : ChunkOf<Layout::QKV> {
  using ChunkOf::ChunkOf;
  GPU_FN u64 square(u32 which, u32 i, u32 j) const { return (number() * 3 + which) * SQUARE + i * CHUNK + j; }
  GPU_FN void load_gates(UnitGates& g, const float* info) const {
    barrier();
    u32 i = thread();
    if (i < CHUNK) {
      read_gates(g, info, i);
      g.q_unit[i] = info[plane(Q_UNIT, i)];
      g.k_unit[i] = info[plane(K_UNIT, i)];
    }
    finish_gates(g);
  }
};

// The work-group's chunk again: recomputing what follows from it keeps scalar registers from spilling.
GPU_FN Chunk again(const Sizes& sizes, u32 number) {
  return Chunk(sizes, uniform_barrier(block_y()), uniform_barrier(number));
}

// ---- forward --------------------------------------------------------------------------------------------------------
// Launch: (chunks, rows) work-groups of 256.
extern "C" GPU_KERNEL(256) void delta_system(DELTA_ARGUMENTS, const float* g, const float* beta, const int* doc_start,
                                             const int* cache_len, float* info, float* mats, float* decayed,
                                             float* values) {
  TILE_MEMORY;
  GPU_SHARED(UnitGates, gates_of, 1);
  GPU_SHARED(float, system, SQUARE);
  GPU_SHARED(float, inverse, CHUNK * INVERSE_ROW);
  UnitGates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 i = thread() / 4;
  float squares_q = 0.f, squares_k = 0.f;  // of a token's q and k, summed by four work-items
  for (u32 d = thread() % 4; d < keys; d += 4) {
    float x = c.q(i, d), y = c.k(i, d);
    squares_q += x * x;
    squares_k += y * y;
  }
  squares_q = row_reduce<4>(squares_q, Sum{});
  squares_k = row_reduce<4>(squares_k, Sum{});
  if (thread() % 4 == 0) {
    gates.q_unit[i] = i < c.count ? scale / gpu::sqrt(squares_q + EPS) : 0.f;
    gates.k_unit[i] = i < c.count ? 1.f / gpu::sqrt(squares_k + EPS) : 0.f;
    info[c.plane(Q_UNIT, i)] = gates.q_unit[i];
    info[c.plane(K_UNIT, i)] = gates.k_unit[i];
  }
  c.make_gates(gates, g, beta, doc_start, cache_len, info);
  const auto key = [&](u32 n, u32 j) { return c.k(j, n) * gates.k_unit[j]; };
  Tile kk, qk;
  kk.add<ALONG, ALONG>(memory, keys, [&](u32 r, u32 n) { return c.k(r, n) * gates.k_unit[r]; }, key);
  qk.add<ALONG, ALONG>(memory, keys, [&](u32 r, u32 n) { return c.q(r, n) * gates.q_unit[r]; }, key);
  kk.each([&](u32 r, u32 j, float x) {
    x = j < r ? x * c.decay(gates, r, j) : 0.f;
    system[r * CHUNK + j] = x;
    mats[c.square(SYSTEM, r, j)] = x;
  });
  qk.each([&](u32 r, u32 j, float x) { mats[c.square(SCORES, r, j)] = x * c.decay(gates, r, j); });
  // The inverse row by row, by forward substitution; four work-items share an element.
  for (u32 to = 0; to < CHUNK; to++) {
    barrier();
    float before = 0.f;
    for (u32 n = thread() % 4; n < to; n += 4) before += system[to * CHUNK + n] * inverse[n * INVERSE_ROW + i];
    before = row_reduce<4>(before, Sum{});
    float x = to == i ? 1.f : to < i ? 0.f : -gates.beta[to] * before;
    if (thread() % 4 == 0) inverse[to * INVERSE_ROW + i] = x;
  }
  barrier();
  for (u32 e = thread(); e < SQUARE; e += 256) mats[c.square(INVERSE, 0, e)] = inverse[e / CHUNK * INVERSE_ROW + e % CHUNK];
  const auto left = [&](u32 r, u32 n) { return inverse[r * INVERSE_ROW + n]; };
  for (u32 first = 0; first < keys; first += CHUNK) {
    Tile tile;
    tile.add<ALONG, ACROSS>(memory, CHUNK, left, [&](u32 n, u32 d) {
      return gates.beta[n] * gates.inside[n] * gates.k_unit[n] * c.k(n, first + d);
    });
    tile.each([&](u32 r, u32 d, float x) {
      if (first + d < keys) decayed[c.key_at(r, first + d)] = x;
    });
  }
  for (u32 first = 0; first < width; first += CHUNK) {
    Tile tile;
    tile.add<ALONG, ACROSS>(memory, CHUNK, left, [&](u32 n, u32 j) { return gates.beta[n] * c.v(n, first + j); });
    tile.each([&](u32 r, u32 j, float x) {
      if (first + j < width) values[c.value_at(0, r, first + j)] = x;
    });
  }
}

// before, saved, after: states [rows, keys, width]: the one before the segment (null: zeros), a copy of it to keep (or
// null), and the one after the segment. before and after may be the same array. Launch: (ceil(width / 64), rows)
// work-groups of 256.
extern "C" GPU_KERNEL(256) void delta_scan(DELTA_ARGUMENTS, const float* info, const float* decayed, float* values,
                                           float* states, const float* before, float* saved, float* after) {
  TILE_MEMORY;
  GPU_SHARED(UnitGates, gates_of, 1);
  UnitGates& gates = gates_of[0];
  u32 column = block_x() * CHUNK, own = width - column;  // the work-group's first column, and columns from there on
  {
    const Chunk c(SIZES, block_y(), 0);
    for (u32 e = thread(); e < keys * CHUNK; e += 256) {
      u32 d = e / CHUNK, j = e % CHUNK;
      if (j >= own) continue;
      float x = before ? before[c.state_at(0, d, column + j)] : 0.f;
      states[c.state_at(0, d, column + j)] = x;
      if (saved) saved[c.state_at(0, d, column + j)] = x;
    }
  }
  for (u32 number = 0; number < chunks; number++) {
    const Chunk c(SIZES, block_y(), number);
    c.load_gates(gates, info);
    Tile tile;
    tile.add<ALONG, ACROSS>(
        memory, keys, [&](u32 r, u32 d) { return decayed[c.key_at(r, d)]; },
        [&](u32 d, u32 j) { return j < own ? states[c.state_at(number, d, column + j)] : 0.f; });
    tile.each([&](u32 r, u32 j, float x) {
      if (j < own) values[c.value_at(0, r, column + j)] -= x;
    });
    barrier();
    float whole = gates.inside[c.count - 1];
    for (u32 first = 0; first < keys; first += CHUNK) {
      Tile kept;
      kept.add<ACROSS, ACROSS>(
          memory, CHUNK, [&](u32 d, u32 n) { return c.k(n, first + d) * gates.k_unit[n] * gates.to_end[n]; },
          [&](u32 n, u32 j) { return j < own ? values[c.value_at(0, n, column + j)] : 0.f; });
      kept.each([&](u32 d, u32 j, float x) {
        if (j >= own || first + d >= keys) return;
        x += whole * states[c.state_at(number, first + d, column + j)];
        if (number + 1 < chunks) {
          states[c.state_at(number + 1, first + d, column + j)] = x;
        } else {
          after[c.state_at(0, first + d, column + j)] = x;
        }
      });
    }
  }
}

// types: qkv, y. Launch: (chunks, rows, ceil(width / 64)) work-groups of 256.
extern "C" GPU_KERNEL(256) void delta_output(DELTA_ARGUMENTS, const float* info, const float* mats, const float* values,
                                             const float* states, void* y) {
  TILE_MEMORY;
  GPU_SHARED(UnitGates, gates_of, 1);
  UnitGates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 column = block_z() * CHUNK, own = width - column;
  c.load_gates(gates, info);
  Tile tile;
  tile.add<ALONG, ACROSS>(
      memory, keys, [&](u32 r, u32 d) { return c.q(r, d) * gates.q_unit[r] * gates.inside[r]; },
      [&](u32 d, u32 j) { return j < own ? states[c.state_at(block_x(), d, column + j)] : 0.f; });
  tile.add<ALONG, ACROSS>(
      memory, CHUNK, [&](u32 r, u32 n) { return mats[c.square(SCORES, r, n)]; },
      [&](u32 n, u32 j) { return j < own ? values[c.value_at(0, n, column + j)] : 0.f; });
  tile.each([&](u32 r, u32 j, float x) {
    if (r < c.count && j < own) store(y, type_of(types, 1), c.gate_at(r) * width + column + j, x);
  });
}

// Token by token: S = exp(g) S + k (beta (v - exp(g) S' k))', y = S' q. types: qkv, y. Launch: (ceil(width / 64), rows)
// work-groups of 256; four work-items share a column of the state.
extern "C" GPU_KERNEL(256) void delta_step(DELTA_ARGUMENTS, const float* g, const float* beta, const int* doc_start,
                                           const int* cache_len, float* state, void* y) {
  GPU_SHARED(float, memory, 256 / GPU_WAVE);
  GPU_SHARED(float, q_of, MOST_KEYS);
  GPU_SHARED(float, k_of, MOST_KEYS);
  const Chunk c(SIZES, block_y(), 0);
  u32 column = block_x() * CHUNK + thread() / 4, safe = min(column, width - 1);
  for (u32 t = 0; t < tokens; t++) {
    float q = 0.f, k = 0.f;
    barrier();
    if (thread() < keys) {
      q = c.q(t, thread()), k = c.k(t, thread());
      q_of[thread()] = q;
      k_of[thread()] = k;
    }
    float q_unit = scale / gpu::sqrt(block_sum<256>(q * q, memory) + EPS);
    float k_unit = 1.f / gpu::sqrt(block_sum<256>(k * k, memory) + EPS);
    // The first token of a document starts from zeros; a token before its document's start leaves no state.
    int position = cache_len[0] + int(t), begins = doc_start[c.row + t];
    bool goes_on = begins < position;
    float kept = goes_on ? gpu::exp(g[c.gate_at(t)]) : 0.f, read = 0.f;
    for (u32 d = thread() % 4; d < keys; d += 4) {
      float x = state[c.state_at(0, d, safe)];
      read += k_of[d] * k_unit * (goes_on ? kept * x : 0.f);
    }
    read = row_reduce<4>(read, Sum{});
    float correction = begins <= position ? beta[c.gate_at(t)] * (c.v(t, safe) - read) : 0.f, sum = 0.f;
    for (u32 d = thread() % 4; d < keys; d += 4) {
      float x = state[c.state_at(0, d, safe)];
      x = (goes_on ? kept * x : 0.f) + k_of[d] * k_unit * correction;
      sum += q_of[d] * q_unit * x;
      if (column < width) state[c.state_at(0, d, column)] = x;
    }
    sum = row_reduce<4>(sum, Sum{});
    if (thread() % 4 == 0 && column < width) store(y, type_of(types, 1), c.gate_at(t) * width + column, sum);
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// values, plane 1: overwritten with dnew. after, before: gradients of the states after the segment (null: zeros) and
// before it; may be the same array. types: qkv, dy. Launch: as delta_scan.
extern "C" GPU_KERNEL(256) void delta_scan_backward(DELTA_ARGUMENTS, const float* info, const float* mats,
                                                    const float* decayed, const void* dy, float* values, float* dstates,
                                                    const float* after, float* before) {
  TILE_MEMORY;
  GPU_SHARED(UnitGates, gates_of, 1);
  UnitGates& gates = gates_of[0];
  u32 column = block_x() * CHUNK, own = width - column;
  {
    const Chunk c(SIZES, block_y(), 0);
    for (u32 e = thread(); e < keys * CHUNK; e += 256) {
      u32 d = e / CHUNK, j = e % CHUNK;
      if (j < own) dstates[c.state_at(chunks - 1, d, column + j)] = after ? after[c.state_at(0, d, column + j)] : 0.f;
    }
  }
  for (u32 number = chunks; number-- > 0;) {
    const Chunk c(SIZES, block_y(), number);
    c.load_gates(gates, info);
    Tile tile;
    tile.add<ACROSS, ACROSS>(
        memory, CHUNK, [&](u32 r, u32 n) { return mats[c.square(SCORES, n, r)]; },
        [&](u32 n, u32 j) { return j < own ? c.dy(dy, n, column + j) : 0.f; });
    tile.add<ALONG, ACROSS>(
        memory, keys, [&](u32 r, u32 d) { return c.k(r, d) * gates.k_unit[r] * gates.to_end[r]; },
        [&](u32 d, u32 j) { return j < own ? dstates[c.state_at(number, d, column + j)] : 0.f; });
    tile.each([&](u32 r, u32 j, float x) {
      if (j < own) values[c.value_at(1, r, column + j)] = x;
    });
    barrier();
    float whole = gates.inside[c.count - 1];
    for (u32 first = 0; first < keys; first += CHUNK) {
      const Chunk c = again(SIZES, number);
      Tile grad;
      grad.add<ACROSS, ACROSS>(
          memory, CHUNK, [&](u32 d, u32 n) { return c.q(n, first + d) * gates.q_unit[n] * gates.inside[n]; },
          [&](u32 n, u32 j) { return j < own ? c.dy(dy, n, column + j) : 0.f; });
      grad.add<ACROSS, ACROSS>(
          memory, CHUNK, [&](u32 d, u32 n) { return first + d < keys ? -decayed[c.key_at(n, first + d)] : 0.f; },
          [&](u32 n, u32 j) { return j < own ? values[c.value_at(1, n, column + j)] : 0.f; });
      grad.each([&](u32 d, u32 j, float x) {
        if (j >= own || first + d >= keys) return;
        x += whole * dstates[c.state_at(number, first + d, column + j)];
        if (number > 0) {
          dstates[c.state_at(number - 1, first + d, column + j)] = x;
        } else {
          before[c.state_at(0, first + d, column + j)] = x;
        }
      });
    }
  }
}

// values, plane 1: dnew, overwritten with X' dnew. dqk f32 [rows, chunks, 64, 2 keys]; dqkv: receives v's gradient;
// dg, dbeta like g.
// types: qkv, dy. Launch: (chunks, rows) work-groups of 256.
extern "C" GPU_KERNEL(256) void delta_grads(DELTA_ARGUMENTS, const float* info, const float* mats, float* values,
                                            const float* states, const float* dstates, const void* dy, float* dqk,
                                            void* dqkv, float* dg, float* dbeta) {
  constexpr u32 ROW = CHUNK + 1;
  TILE_MEMORY;
  GPU_SHARED(UnitGates, gates_of, 1);
  GPU_SHARED(float, of_scores, CHUNK * ROW);
  GPU_SHARED(float, of_system, CHUNK * ROW);
  GPU_SHARED(float, pairs, CHUNK);
  GPU_SHARED(float, sums, CHUNK);
  GPU_SHARED(float, ends, CHUNK);
  GPU_SHARED(float, rates, CHUNK);
  GPU_SHARED(float, totals, 256 / GPU_WAVE);
  UnitGates& gates = gates_of[0];
  const Chunk c(SIZES, block_y(), block_x());
  u32 slot = block_x();
  c.load_gates(gates, info);
  if (thread() < CHUNK) pairs[thread()] = sums[thread()] = ends[thread()] = rates[thread()] = 0.f;
  barrier();
  for (u32 first = 0; first < width; first += CHUNK) {
    Tile tile;
    tile.add<ACROSS, ACROSS>(
        memory, CHUNK, [&](u32 r, u32 n) { return mats[c.square(INVERSE, n, r)]; },
        [&](u32 n, u32 j) { return first + j < width ? values[c.value_at(1, n, first + j)] : 0.f; });
    barrier();  // all have read these columns
    tile.each([&](u32 r, u32 j, float x) {
      if (first + j >= width) return;
      values[c.value_at(1, r, first + j)] = x;
      if (r < c.count) store(dqkv, type_of(types, 0), c.value_channel(r, first + j), gates.beta[r] * x);
    });
    tile.sum_rows(rates, [&](u32 r, u32 j, float x) { return x * c.v(r, first + j); });
  }
  barrier();
  {
    const Chunk c = again(SIZES, slot);
    const auto new_across = [&](u32 n, u32 j) { return values[c.value_at(0, j, n)]; };
    Tile scores;
    scores.add<ALONG, ALONG>(memory, width, [&](u32 r, u32 n) { return c.dy(dy, r, n); }, new_across);
    scores.each([&](u32 r, u32 j, float x) { of_scores[r * ROW + j] = x; });
    Tile system;
    system.add<ALONG, ALONG>(memory, width, [&](u32 r, u32 n) { return values[c.value_at(1, r, n)]; }, new_across);
    system.each([&](u32 r, u32 j, float x) { of_system[r * ROW + j] = j < r ? -x : 0.f; });
    system.sum_rows(rates, [&](u32 r, u32 j, float x) { return -x * mats[c.square(SYSTEM, r, j)]; });
  }
  barrier();
  add_pairs(memory, pairs, [&](u32 i, u32 n) {
    float of_rate = of_system[i * ROW + n] * mats[c.square(SYSTEM, i, n)];
    return of_scores[i * ROW + n] * mats[c.square(SCORES, i, n)] + gates.beta[i] * of_rate;
  });
  barrier();
  for (u32 e = thread(); e < SQUARE; e += 256) {
    u32 i = e / CHUNK, j = e % CHUNK;
    float decay = c.decay(gates, i, j);
    of_scores[i * ROW + j] *= decay;
    of_system[i * ROW + j] *= gates.beta[i] * decay;
  }
  barrier();
  for (u32 first = 0; first < keys; first += CHUNK) {
    const Chunk c = again(SIZES, slot);
    const auto key = [&](u32 n, u32 d) { return c.k(n, first + d) * gates.k_unit[n]; };
    const auto query = [&](u32 n, u32 d) { return c.q(n, first + d) * gates.q_unit[n]; };
    const auto state = [&](u32 n, u32 d) { return first + d < keys ? states[c.state_at(slot, first + d, n)] : 0.f; };
    const auto next = [&](u32 n, u32 d) { return first + d < keys ? dstates[c.state_at(slot, first + d, n)] : 0.f; };
    {
      Tile dq;
      dq.add<ALONG, ALONG>(memory, width, [&](u32 r, u32 n) { return c.dy(dy, r, n); }, state);
      dq.sum_rows(sums, [&](u32 r, u32 d, float x) { return gates.inside[r] * query(r, d) * x; });
      dq.scale_rows(gates.inside);
      dq.add<ACROSS, ACROSS>(memory, CHUNK, [&](u32 r, u32 n) { return of_scores[r * ROW + n]; }, key);
      dq.each([&](u32 r, u32 d, float x) {
        if (first + d < keys) dqk[c.pair_at(r, 0, first + d)] = x;
      });
    }
    Tile dk, by_next;
    dk.add<ALONG, ALONG>(memory, width, [&](u32 r, u32 n) { return values[c.value_at(1, r, n)]; }, state);
    dk.sum_rows(rates, [&](u32 r, u32 d, float x) { return -gates.inside[r] * key(r, d) * x; });
    dk.sum_rows(sums, [&](u32 r, u32 d, float x) { return -gates.inside[r] * gates.beta[r] * key(r, d) * x; });
    by_next.add<ALONG, ALONG>(memory, width, [&](u32 r, u32 n) { return values[c.value_at(0, r, n)]; }, next);
    by_next.sum_rows(ends, [&](u32 r, u32 d, float x) { return gates.to_end[r] * key(r, d) * x; });
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 r = Tile::row() + i;
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        dk.at[j][i] = gates.to_end[r] * by_next.at[j][i] - gates.inside[r] * gates.beta[r] * dk.at[j][i];
    }
    dk.add<ACROSS, ACROSS>(memory, CHUNK, [&](u32 r, u32 n) { return of_system[r * ROW + n] + of_system[n * ROW + r]; }, key);
    dk.add<ACROSS, ACROSS>(memory, CHUNK, [&](u32 r, u32 n) { return of_scores[n * ROW + r]; }, query);
    dk.each([&](u32 r, u32 d, float x) {
      if (first + d < keys) dqk[c.pair_at(r, 1, first + d)] = x;
    });
  }
  float total = 0.f;
  for (u32 e = thread(); e < keys * width; e += 256)
    total += states[c.state_at(slot, 0, e)] * dstates[c.state_at(slot, 0, e)];
  total = block_sum<256>(total, totals);
  if (thread() < c.count) {
    u32 j = thread();
    dg[c.gate_at(j)] = pairs[j] + gate_gradient(sums, ends, gates.inside[c.count - 1] * total, c.count);
    dbeta[c.gate_at(j)] = rates[j];
  }
}

// dqkv: receives the gradients of q and k, summed over the heads that share a key head, before normalization:
// dx = (dx1 - x1 (x1 dx1)) / |x|, x1 = x / |x|.
// Launch: (tokens of the segment, batch) work-groups of 256; each wave loops over the 2 key_heads vectors.
extern "C" GPU_KERNEL(256) void delta_channels(DELTA_ARGUMENTS, const float* info, const float* dqk, void* dqkv) {
  u32 share = heads / key_heads, i = block_x() % CHUNK;
  for (u32 part = wave(); part < 2 * key_heads; part += 256 / GPU_WAVE) {
    u32 which = part / key_heads, of_key = part % key_heads;
    const Chunk c(SIZES, block_y() * heads + of_key * share, block_x() / CHUNK);
    float unit = info[c.plane(Q_UNIT + which, i)], inverse = which == 0 ? 1.f / scale : 1.f, along = 0.f;
    const auto shared = [&](u32 d) { return c.sum_heads(dqk, i, which, d); };
    const auto own = [&](u32 d) { return (which == 0 ? c.q(i, d) : c.k(i, d)) * unit * inverse; };
    for (u32 d = lane(); d < keys; d += GPU_WAVE) along += own(d) * shared(d);
    along = wave_sum(along);
    for (u32 d = lane(); d < keys; d += GPU_WAVE)
      store(dqkv, type_of(types, 0), c.channel(i, part * keys + d), unit * (shared(d) - own(d) * along));
  }
}
