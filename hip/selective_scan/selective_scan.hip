// Mamba-1's recurrence in chunks of 64 tokens, in float32; the formulas are in autograd/ops/selective_scan.py.
//
//     ends:   what each chunk adds to the state; backward: to the gradient of the state before it
//     carry:  through the chunks of a segment: the state before each; backward: the gradient of the state after each
//     output: y = C' h + skip x
//     grads:  gradients of x, dt, and by group of channels of B and C, by chunk of the weight
//     sum:    of the groups' gradients of B and C
//
// A work-group has the states of a block of channels in a chunk, a work-item one state of one of them; each channel has
// 1 << shift work-items (8, 16, 32 or 64), of which some may have no state.
//   x, dt, y, dy, dx, ddt [batch, tokens, channels], bc, dbc [batch, tokens, 2 numbers]
//   weight [channels, numbers + 2] f32; states, dstates [chunks, batch, channels, numbers] f32
//   totals [chunks, batch, channels] f32: the sum of dt over a chunk, -1 if a document begins in it
// Source: Gu and Dao, Mamba (arXiv 2312.00752).
#include "elements.hpp"

using namespace gpu;

constexpr u32 CHUNK = 64, SPAN = 8, THREADS = 256, MOST_WIDE = 64, MOST_BLOCK = 32;  // SPAN: tokens staged at a time

struct Memory {
  float steps[SPAN * MOST_BLOCK], inputs[SPAN * MOST_BLOCK], upstream[SPAN * MOST_BLOCK];
  float into[SPAN * MOST_WIDE], out_of[SPAN * MOST_WIDE], terms[SPAN * THREADS];
  float marks[CHUNK / SPAN * THREADS];  // a work-item's state before each span, read by itself alone
  int flags[SPAN];  // 2: another token of the document is before it; 1: the first; 0: before its document
};

GPU_FN float softplus(float z) {
  float e = gpu::exp(-gpu::abs(z)), after = 0.25f - e * (0.2f - e * (1.f / 6.f - e / 7.f));
  float series = e * (1.f - e * (0.5f - e * (1.f / 3.f - e * after)));
  return max(z, 0.f) + (e < 0.1f ? series : gpu::log(1.f + e));
}

struct Scan {
  const void *x, *dt, *bc;
  const float* weight;
  const int *doc_start, *cache_len;
  u32 batch, tokens, channels, numbers, shift, at, chunks, types;

  GPU_FN float weight_of(u32 channel, u32 column) const { return weight[u64(channel) * (numbers + 2) + column]; }
};
#define SCAN_ARGUMENTS                                                                                                 \
  const void *x, const void *dt, const void *bc, const float *weight, const int *doc_start, const int *cache_len, \
      u32 batch, u32 tokens, u32 channels, u32 numbers, u32 shift, u32 at, u32 chunks, u32 types
#define SCAN                                                                                                \
  Scan { x, dt, bc, weight, doc_start, cache_len, batch, tokens, channels, numbers, shift, at, chunks, types }

// A block of channels in a chunk. Launch: (blocks or groups of them, chunks, batch) work-groups.
struct Chunk {
  const Scan s;
  Memory& m;
  u32 wide, width;  // work-items of a channel, and channels of a block
  u32 b, slot, count, block, place, number;
  u64 row;  // of the first token
  float rate;

  GPU_FN Chunk(const Scan& scan, Memory& memory, u32 which_block)
      : s(scan), m(memory), wide(1u << scan.shift), width(THREADS >> scan.shift) {
    b = block_z(), slot = block_y(), block = which_block;
    u32 first = (s.at + slot) * CHUNK;
    count = min(CHUNK, s.tokens - first), row = u64(b) * s.tokens + first;
    place = thread() >> s.shift, number = thread() & (wide - 1);
    rate = is_state() ? -gpu::exp(s.weight_of(block * width + place, number)) : -1.f;
  }
  GPU_FN bool is_state() const { return number < s.numbers && block * width + place < s.channels; }
  GPU_FN u64 state_at(u32 chunk) const {
    return ((u64(chunk) * s.batch + b) * s.channels + block * width + place) * s.numbers + number;
  }
  // The token of the span and the channel whose sum over states a work-item makes.
  GPU_FN u32 token() const { return thread() * wide / THREADS; }
  GPU_FN u32 column() const { return thread() & (width - 1); }
  GPU_FN u32 channel() const { return block * width + column(); }
  GPU_FN bool has_sum(u32 first) const {
    return token() < SPAN && first + token() < count && channel() < uniform_barrier(s.channels);
  }
  GPU_FN u64 element(u32 first) const { return (row + first + token()) * uniform_barrier(s.channels) + channel(); }

  // Read SPAN tokens. One past the chunk's end changes no state. UPSTREAM: dy is read into `upstream`.
  template <bool UPSTREAM = false>
  GPU_FN void stage(u32 first, const void* dy = nullptr) const {
    // New values to the compiler: what follows from them is not kept in scalar registers through the kernel.
    const u32 types = uniform_barrier(s.types), numbers = uniform_barrier(s.numbers), shift = uniform_barrier(s.shift);
    barrier();
    if (token() < SPAN) {
      bool there = has_sum(first);
      u64 e = there ? element(first) : 0;
      m.steps[thread()] = there ? softplus(load(s.dt, type_of(types, 1), e) + s.weight_of(channel(), s.numbers + 1)) : 0.f;
      m.inputs[thread()] = there ? load(s.x, type_of(types, 0), e) : 0.f;
      m.upstream[thread()] = there && UPSTREAM ? load(dy, type_of(types, 2), e) : 0.f;
    }
    for (u32 n = thread(); n < SPAN << shift; n += THREADS) {
      u32 t = first + (n >> shift), own = n & ((1u << shift) - 1);
      bool there = t < count && own < numbers;
      u64 e = (row + t) * 2 * numbers + own;
      m.into[n] = there ? load(s.bc, type_of(types, 1), e) : 0.f;
      m.out_of[n] = there ? load(s.bc, type_of(types, 1), e + numbers) : 0.f;
    }
    if (thread() < SPAN) {
      u32 t = first + thread();
      int position = s.cache_len[0] + int((s.at + slot) * CHUNK + t);
      int begins = t < count ? s.doc_start[row + t] : position - 1;
      m.flags[thread()] = begins < position ? 2 : begins == position ? 1 : 0;
    }
    barrier();
  }
  GPU_FN float step(u32 j) const { return m.steps[j * width + place]; }
  GPU_FN float decay(u32 j) const { return m.flags[j] == 2 ? gpu::exp(rate * step(j)) : 0.f; }
  GPU_FN float added(u32 j) const { return m.flags[j] > 0 ? step(j) * m.inputs[j * width + place] : 0.f; }
  GPU_FN float into(u32 j) const { return m.into[j * wide + number]; }
  GPU_FN float out_of(u32 j) const { return m.out_of[j * wide + number]; }
  GPU_FN float upstream(u32 j) const { return m.upstream[j * width + place]; }
  // The sum over states of `terms` for the work-item's token and channel.
  GPU_FN float sum_of_states() const {
    float sum = 0.f;
    const u32 states = 1u << uniform_barrier(s.shift);
    for (u32 k = 0; k < states; k++)
      sum += m.terms[token() * THREADS + column() * states + ((k + thread()) & (states - 1))];
    return sum;
  }
};

// states: overwritten with what each chunk adds. backward: x is dy. types: x, dt.
extern "C" GPU_KERNEL(256) void selective_scan_ends(SCAN_ARGUMENTS, u32 backward, float* totals, float* states) {
  GPU_SHARED(Memory, memory, 1);
  const Chunk c(SCAN, memory[0], block_x());
  float state = 0.f, total = 0.f, product = 1.f;
  for (u32 first = 0; first < c.count; first += SPAN) {
    c.stage(first);
#pragma unroll
    for (u32 j = 0; j < SPAN; j++) {
      float factor = c.decay(j);
      total = c.m.flags[j] == 2 && total >= 0.f ? total + c.step(j) : -1.f;
      if (backward) {
        product *= factor;
        state = gpu::fma(product * c.out_of(j), c.m.inputs[j * c.width + c.place], state);
      } else {
        state = gpu::fma(factor, state, c.added(j) * c.into(j));
      }
    }
  }
  if (c.is_state()) states[c.state_at(c.slot)] = state;
  u32 channel = c.block * c.width + c.place;
  if (c.number == 0 && channel < channels) totals[(u64(c.slot) * batch + c.b) * channels + channel] = total;
}

// states: overwritten with the state before each chunk, backward with the gradient of the state after it. before, after
// [batch, channels, numbers]: of the first chunk (null: zeros) and of the last; they may be the same array. Launch: one
// work-item per number of them.
extern "C" GPU_KERNEL(256) void selective_scan_carry(const float* weight, const float* totals, float* states,
                                                     const float* before, float* after, u32 batch, u32 channels,
                                                     u32 numbers, u32 chunks, u32 backward) {
  u64 size = u64(batch) * channels * numbers, place = u64(block_x()) * THREADS + thread();
  if (place >= size) return;
  u64 row = place / numbers;
  float rate = -gpu::exp(weight[row % channels * (numbers + 2) + place % numbers]);
  float state = before ? before[place] : 0.f;
  for (u32 n = 0; n < chunks; n++) {
    u64 chunk = backward ? chunks - 1 - n : n;
    float total = totals[chunk * batch * channels + row], own = states[chunk * size + place];
    states[chunk * size + place] = state;
    state = total >= 0.f ? gpu::fma(gpu::exp(rate * total), state, own) : own;
  }
  after[place] = state;
}

// states: before each chunk; stateful: of the only chunk, overwritten with the one after it. types: x and y, dt.
extern "C" GPU_KERNEL(256) void selective_scan_output(SCAN_ARGUMENTS, u32 stateful, float* states, void* y) {
  GPU_SHARED(Memory, memory, 1);
  const Chunk c(SCAN, memory[0], block_x());
  float state = c.is_state() ? states[c.state_at(c.slot)] : 0.f;
  for (u32 first = 0; first < c.count; first += SPAN) {
    c.stage(first);
#pragma unroll
    for (u32 j = 0; j < SPAN; j++) {
      state = gpu::fma(c.decay(j), state, c.added(j) * c.into(j));
      c.m.terms[j * THREADS + thread()] = c.out_of(j) * state;
    }
    barrier();
    if (c.has_sum(first)) {
      float direct = c.s.weight_of(c.channel(), numbers) * c.m.inputs[thread()];
      store(y, type_of(types, 0), c.element(first), c.sum_of_states() + direct);
    }
  }
  if (stateful && c.is_state()) states[c.state_at(c.slot)] = state;
}

// The sums over the block's channels of `terms`, written or added to the group's part of the gradient of B (which 0) or
// C (1).
GPU_FN void write_part(const Chunk& c, float* parts, u32 which, u32 first, bool adds) {
  const u32 numbers = uniform_barrier(c.s.numbers), shift = uniform_barrier(c.s.shift);
  const u32 wide = 1u << shift, width = THREADS >> shift;
  const u32 row = (block_x() * uniform_barrier(c.s.batch) + c.b) * uniform_barrier(c.s.chunks) + c.slot;
  barrier();
  for (u32 n = thread(); n < SPAN * wide; n += THREADS) {
    u32 j = n >> shift, t = first + j, own = n & (wide - 1);
    if (t >= c.count || own >= numbers) continue;
    float sum = 0.f;
    for (u32 k = 0; k < width; k++) sum += c.m.terms[j * THREADS + k * wide + own];
    u64 token = u64(row) * CHUNK + t;
    float* here = parts + (token * 2 + which) * numbers + own;
    *here = adds ? *here + sum : sum;
  }
  barrier();
}
// Add the sum over a span's tokens of what their work-items have to a column of the weight's gradient.
GPU_FN void add_to_sums(const Chunk& c, float* sums, u32 column, float own) {
  barrier();
  c.m.terms[thread()] = own;
  barrier();
  if (thread() >= c.width || c.channel() >= c.s.channels) return;
  float sum = 0.f;
  for (u32 j = 0; j < SPAN; j++) sum += c.m.terms[j * c.width + thread()];
  sums[c.channel() * u64(c.s.numbers + 2) + column] += sum;
}

// Each work-group has `rounds` blocks of channels, one after the other. dstates: the gradient of the state after each
// chunk; sums [batch, chunks, channels, numbers + 2] f32 (or null): added to; parts [groups, batch, chunks 64, 2
// numbers] f32: overwritten. types: x and dx, dt and ddt, dy.
extern "C" GPU_KERNEL(256) void selective_scan_grads(SCAN_ARGUMENTS, u32 rounds, const float* states,
                                                     const float* dstates, const void* dy, float* sums, float* parts,
                                                     void* dx, void* ddt) {
  GPU_SHARED(Memory, memory, 1);
  for (u32 turn = 0; turn < rounds; turn++) {
    // New values to the compiler: what follows from them is not kept in scalar registers through all turns.
    Scan scan = SCAN;
    scan.batch = uniform_barrier(batch), scan.tokens = uniform_barrier(tokens), scan.channels = uniform_barrier(channels);
    scan.numbers = uniform_barrier(numbers), scan.shift = uniform_barrier(shift), scan.chunks = uniform_barrier(chunks);
    scan.at = uniform_barrier(at);
    const u32 block = block_x() * uniform_barrier(rounds) + turn;
    if (block * (THREADS >> scan.shift) >= scan.channels) break;
    const Chunk c(scan, memory[0], block);
    float state = 0.f, upper = 0.f;  // upper: the gradient of the state
    if (c.is_state()) state = states[c.state_at(c.s.at + c.slot)], upper = dstates[c.state_at(c.slot)];
    // Not unrolled: eight spans side by side spill scalar registers.
#pragma nounroll
    for (u32 first = 0; first < c.count; first += SPAN) {
      c.m.marks[first / SPAN * THREADS + thread()] = state;
      c.stage(first);
#pragma unroll
      for (u32 j = 0; j < SPAN; j++) state = gpu::fma(c.decay(j), state, c.added(j) * c.into(j));
    }
    float of_rate = 0.f, of_skip = 0.f, of_bias = 0.f;
#pragma nounroll
    for (u32 span = (c.count + SPAN - 1) / SPAN; span-- > 0;) {
      const u32 first = span * SPAN, kinds = uniform_barrier(types);
      c.stage<true>(first, dy);
      float reached[SPAN + 1], factors[SPAN], by_decay[SPAN], by_into[SPAN];
      reached[0] = c.m.marks[span * THREADS + thread()];
#pragma unroll
      for (u32 j = 0; j < SPAN; j++) {
        factors[j] = c.decay(j);
        reached[j + 1] = gpu::fma(factors[j], reached[j], c.added(j) * c.into(j));
      }
#pragma unroll
      for (u32 k = 0; k < SPAN; k++) {
        const u32 j = SPAN - 1 - k;
        upper = gpu::fma(c.out_of(j), c.upstream(j), upper);
        c.m.terms[j * THREADS + thread()] = c.m.flags[j] > 0 ? upper * c.into(j) : 0.f;
        by_into[j] = upper * c.added(j);
        upper *= factors[j];
        by_decay[j] = upper * reached[j] * c.rate;
        of_rate = gpu::fma(by_decay[j], c.step(j), of_rate);
      }
      barrier();
      float to_input = c.token() < SPAN ? c.sum_of_states() : 0.f;
      barrier();
#pragma unroll
      for (u32 j = 0; j < SPAN; j++) c.m.terms[j * THREADS + thread()] = by_decay[j];
      barrier();
      if (c.has_sum(first)) {
        u64 e = c.element(first);
        float given = c.m.upstream[thread()], input = c.m.inputs[thread()];
        store(dx, type_of(kinds, 0), e, gpu::fma(c.m.steps[thread()], to_input, c.s.weight_of(c.channel(), c.s.numbers) * given));
        float z = load(dt, type_of(kinds, 1), e) + c.s.weight_of(c.channel(), c.s.numbers + 1);
        float of_dt = gpu::fma(input, to_input, c.sum_of_states()) / (1.f + gpu::exp(min(-z, 87.f)));
        store(ddt, type_of(kinds, 1), e, of_dt);
        of_skip = gpu::fma(given, input, of_skip);
        of_bias += of_dt;
      }
      barrier();
#pragma unroll
      for (u32 j = 0; j < SPAN; j++) c.m.terms[j * THREADS + thread()] = by_into[j];
      write_part(c, parts, 0, first, turn > 0);
#pragma unroll
      for (u32 j = 0; j < SPAN; j++) c.m.terms[j * THREADS + thread()] = c.upstream(j) * reached[j + 1];
      write_part(c, parts, 1, first, turn > 0);
    }
    if (!(uniform_barrier(u32(u64(sums))) | uniform_barrier(u32(u64(sums) >> 32)))) continue;
    const u32 own = uniform_barrier(numbers), of_channels = uniform_barrier(channels);
    float* here = sums + (u64(c.b) * uniform_barrier(chunks) + c.slot) * of_channels * (own + 2);
    if (c.is_state()) here[u64(c.block * c.width + c.place) * (own + 2) + c.number] += of_rate;
    add_to_sums(c, here, own, of_skip);
    add_to_sums(c, here, own + 1, of_bias);
  }
}

// parts [groups, batch, here, width] f32, of `here` tokens from `at` on; dbc: overwritten for those. Launch: one
// work-item per number of a group.
extern "C" GPU_KERNEL(256) void selective_scan_sum(const float* parts, void* dbc, u32 batch, u32 tokens, u32 width,
                                                   u32 at, u32 here, u32 groups, u32 types) {
  u64 size = u64(batch) * here * width, place = u64(block_x()) * THREADS + thread();
  u64 t = at + place / width % here;
  if (place >= size || t >= tokens) return;
  float sum = 0.f;
  for (u32 group = 0; group < groups; group++) sum += parts[group * size + place];
  store(dbc, type_of(types, 0), (place / width / here * tokens + t) * width + place % width, sum);
}
