// Parts of Mamba-1's recurrence (formulas: autograd/ops/selective_scan.py).

#part scan
// Part of every kernel of chunks: a workgroup has the states of BLOCK channels in a chunk of CHUNK tokens, an invocation
// one state (`number`) of one of them (`place`). Each channel has WIDE invocations, of which some may have no state.
// x [batch, tokens, channels] X_T; dt like x, bc [batch, tokens, 2 numbers] T; weight [channels, numbers + 2] f32; states f32
// [chunks, batch, channels, numbers]. The arrays of tokens are staged SPAN tokens at a time.
struct Params {
  batch: u32, tokens: u32, channels: u32, numbers: u32,
  at: u32, chunks: u32,  // the first chunk of the segment, and its number of chunks
  blocks: u32, rounds: u32,  // of channels, and how many of them a workgroup has, one after the other
  sums_at: u32, parts_at: u32, flags_at: u32,  // where these begin in `scratch` (selective_scan_grads.wgsl)
  second: u32,  // where the second array of dxdt begins
  first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> dt: array<T>;
@group(0) @binding(3) var<storage, read> bc: array<T>;
@group(0) @binding(4) var<storage, read> weight: array<f32>;

const CHUNK = 64u;
const SPANS = CHUNK / SPAN;
const SLOTS = SPAN * BLOCK;

var<private> b: u32;
var<private> chunk: u32;  // of the segment
var<private> count: u32;  // tokens of the chunk
var<private> row: u32;  // of the chunk's first token, in arrays [B, T, ...]
var<private> block: u32;
var<private> place: u32;  // of the invocation's channel in its block
var<private> number: u32;
var<private> rate: f32;

var<workgroup> steps: array<f32, SLOTS>;
var<workgroup> inputs: array<f32, SLOTS>;
var<workgroup> into: array<f32, SPAN * WIDE>;  // B
var<workgroup> out_of: array<f32, SPAN * WIDE>;  // C
var<workgroup> flags: array<u32, SPAN>;  // as of `flag`
var<workgroup> terms: array<f32, SPAN * 256>;

fn softplus(z: f32) -> f32 {
  let e = exp(-abs(z));
  let after = 1.0 / 4.0 - e * (1.0 / 5.0 - e * (1.0 / 6.0 - e / 7.0));
  let series = e * (1.0 - e * (1.0 / 2.0 - e * (1.0 / 3.0 - e * after)));
  return max(z, 0.0) + select(log(1.0 + e), series, e < 0.1);
}
fn weight_of(channel: u32, column: u32) -> f32 { return weight[channel * (p.numbers + 2u) + column]; }
fn is_state() -> bool { return number < p.numbers && block * BLOCK + place < p.channels; }
// Where the invocation's state is in arrays [batch, channels, numbers].
fn state_place() -> u32 { return (b * p.channels + block * BLOCK + place) * p.numbers + number; }
fn choose(which: u32, lid: u32) {
  block = which;
  place = lid / WIDE;
  number = lid % WIDE;
  rate = -1.0;
  if (is_state()) { rate = -exp(weight_of(block * BLOCK + place, number)); }
}
// Read the tokens from `start` on. A token past the chunk's end changes no state.
fn stage(start: u32, lid: u32) {
  workgroupBarrier();
  for (var n = lid; n < SLOTS; n += 256u) {
    let channel = block * BLOCK + n % BLOCK;
    let t = start + n / BLOCK;
    steps[n] = 0.0;
    inputs[n] = 0.0;
    if (t < count && channel < p.channels) {
      let e = (row + t) * p.channels + channel;
      steps[n] = softplus(f32(dt[e]) + weight_of(channel, p.numbers + 1u));
      inputs[n] = f32(x[e]);
    }
  }
  for (var n = lid; n < SPAN * WIDE; n += 256u) {
    let t = start + n / WIDE;
    into[n] = 0.0;
    out_of[n] = 0.0;
    if (t < count && n % WIDE < p.numbers) {
      let e = (row + t) * 2u * p.numbers + n % WIDE;
      into[n] = f32(bc[e]);
      out_of[n] = f32(bc[e + p.numbers]);
    }
  }
  if (lid < SPAN) {
    flags[lid] = 2u;
    if (start + lid < count) { flags[lid] = flag(start + lid); }
  }
  workgroupBarrier();
}
fn decay(j: u32) -> f32 { return select(0.0, exp(rate * steps[j * BLOCK + place]), flags[j] == 2u); }
fn added(j: u32) -> f32 { return select(0.0, steps[j * BLOCK + place] * inputs[j * BLOCK + place], flags[j] > 0u); }
#endpart

#part starts doc cache
// Part of kernels with doc_start [batch, tokens] and cache_len [1]: 2 for a token in whose document another one is
// before it, 1 for the first, 0 for one before its document, which adds nothing.
@group(0) @binding($doc) var<storage, read> doc_start: array<i32>;
@group(0) @binding($cache) var<storage, read> cache_len: array<i32>;
fn flag(t: u32) -> u32 {
  let position = cache_len[0] + i32((p.at + chunk) * CHUNK + t);
  let begins = doc_start[row + t];
  return select(select(0u, 1u, begins == position), 2u, begins < position);
}
#endpart

#part begin
// Part of every kernel of chunks: the workgroup's sequence, chunk, and `group` of blocks.
  let at = p.first + wg.x + wg.y * nwg.x;
  if (at >= p.end) { return; }
  let groups = (p.blocks + p.rounds - 1u) / p.rounds;
  let group = at % groups;
  chunk = at / groups % p.chunks;
  b = at / groups / p.chunks;
  // Loops with barriers end by it: WGSL takes no private variable as the same in a workgroup.
  let length = min(CHUNK, p.tokens - (p.at + at / groups % p.chunks) * CHUNK);
  count = length;
  row = b * p.tokens + (p.at + chunk) * CHUNK;
#endpart

#part channel_sum
// Part of the kernels that sum over the states of a channel: the sum of `terms` of token lid / BLOCK of the span and
// channel lid % BLOCK. Invocations begin with different terms, since those of neighbors are in the same bank.
fn channel_sum(lid: u32) -> f32 {
  var sum = 0.0;
  for (var k = 0u; k < WIDE; k++) { sum += terms[lid / BLOCK * 256u + lid % BLOCK * WIDE + (k + lid) % WIDE]; }
  return sum;
}
#endpart
