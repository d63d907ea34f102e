// Sample the next token of each sequence from its logits: greedy, or temperature, top-k, top-p and min-p, then the
// inverse of the cumulative distribution in id order; -1 where a logit is not finite.
//   logits [B, V] f32, uniform [B] f32 in [0, 1), settings [B, 4] f32 (temperature, top-k, top-p, min-p), id [B] i32.
// Nothing is sorted. Floats are compared by `rank`, an unsigned integer that rises with them. A threshold is found by
// repeatedly cutting the range of ranks into five, with one pass over the logits per cut. top-k: the largest rank that
// at least k tokens reach. top-p: the smallest rank whose strictly more probable tokens weigh less than top_p together.
// So tokens with equal logits are kept or dropped together.
// Dispatch: B workgroups of 256, one per sequence.
// Sources: Fan et al., Hierarchical Neural Story Generation (2018); Holtzman et al., Neural Text Degeneration (2020).
struct Params { count: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> uniform_number: array<f32>;
@group(0) @binding(3) var<storage, read> settings: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> id: array<i32>;

const CUTS: u32 = 14u;  // 5^14 is more than there are ranks

var<workgroup> ranks: array<u32, 256>;
var<workgroup> places: array<u32, 256>;
var<workgroup> odd_logits: array<u32, 256>;
var<workgroup> weights: array<f32, 256>;
var<workgroup> counts4: array<vec4<u32>, 256>;
var<workgroup> weights4: array<vec4<f32>, 256>;
var<private> base: u32;  // index of the sequence's first logit
var<private> temperature: f32;

fn rank(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn number(r: u32) -> f32 { return bitcast<f32>(select(~r, r & 0x7fffffffu, (r & 0x80000000u) != 0u)); }

#include "reduce.inc.wgsl" workgroup name=sum_weights type=f32 tile=weights both=mine+other
#include "reduce.inc.wgsl" workgroup name=sum_counts4 type=vec4<u32> tile=counts4 both=mine+other
#include "reduce.inc.wgsl" workgroup name=sum_weights4 type=vec4<f32> tile=weights4 both=mine+other

// A logit; beyond the last, the last. AHEAD of them are loaded at once, because a single workgroup reads them all.
fn near(at: u32) -> f32 { return logits[base + min(at, p.count - 1u)]; }

// Returns the highest rank; places[0] is the lowest id that has it, odd_logits[0] counts logits that are not finite.
fn highest(lid: u32) -> u32 {
  var best = 0u;
  var place = 0u;
  var odd = 0u;
  for (var i = lid; i < p.count; i += 256u * AHEAD) {
#unroll q AHEAD
    let x_$q = near(i + 256u * $qu);
#end
#unroll q AHEAD
    {  // repeats of the last logit do not matter: of equal ranks the lowest place counts
      odd += select(0u, 1u, (bitcast<u32>(x_$q) & 0x7f800000u) == 0x7f800000u);
      let r = rank(x_$q);
      if (r > best) {
        best = r;
        place = i + 256u * $qu;
      }
    }
#end
  }
  ranks[lid] = best;
  places[lid] = place;
  odd_logits[lid] = odd;
  workgroupBarrier();
  for (var width = 128u; width > 0u; width /= 2u) {
    if (lid < width) {
      odd_logits[lid] += odd_logits[lid + width];
      let other = ranks[lid + width];
      let mine = ranks[lid];
      if (other > mine || (other == mine && places[lid + width] < places[lid])) {
        ranks[lid] = other;
        places[lid] = places[lid + width];
      }
    }
    workgroupBarrier();
  }
  let top = ranks[0];
  workgroupBarrier();
  return top;
}

// Weight of a token by its logit, 1 for the most probable; 0 below the threshold.
fn weight(x: f32, top: f32, least: u32) -> f32 {
  return select(0.0, exp((x - top) / temperature), rank(x) >= least);
}

// Four numbers that cut low to high into five: the k-th is low + k step - 1.
fn cut_step(low: u32, high: u32) -> u32 { return (high - low) / 5u + 1u; }
fn cuts(low: u32, high: u32) -> vec4<u32> { return vec4<u32>(low - 1u) + cut_step(low, high) * vec4<u32>(1u, 2u, 3u, 4u); }

// The largest rank that at least k tokens reach.
fn top_k_rank(highest_rank: u32, top_k: u32, lid: u32) -> u32 {
  var low = 0u;  // reached by all
  var high = highest_rank;
  for (var turn = 0u; turn < CUTS; turn++) {
    let at = cuts(low, high) + vec4<u32>(1u);
    var reached = vec4<u32>(0u);
    for (var i = lid; i < p.count; i += 256u * AHEAD) {
#unroll q AHEAD
      let x_$q = near(i + 256u * $qu);
#end
#unroll q AHEAD
      reached += select(vec4<u32>(0u), vec4<u32>(u32(i + 256u * $qu < p.count)), vec4<u32>(rank(x_$q)) >= at);
#end
    }
    let enough = select(vec4<u32>(0u), vec4<u32>(1u), sum_counts4(reached, lid) >= vec4<u32>(top_k));
    workgroupBarrier();
    let step = cut_step(low, high);
    low += step * (enough.x + enough.y + enough.z + enough.w);
    high = min(high, low + step - 1u);
  }
  return low;
}

// The smallest rank of at least `least` above which the tokens weigh less than top_p of all.
fn top_p_rank(highest_rank: u32, least: u32, top_p: f32, lid: u32) -> u32 {
  let top = number(highest_rank);
  var mine = 0.0;
  for (var i = lid; i < p.count; i += 256u * AHEAD) {
#unroll q AHEAD
    let x_$q = near(i + 256u * $qu);
#end
#unroll q AHEAD
    mine += select(0.0, weight(x_$q, top, least), i + 256u * $qu < p.count);
#end
  }
  let limit = top_p * sum_weights(mine, lid);
  workgroupBarrier();
  var low = least;
  var high = highest_rank;  // nothing is above it
  for (var turn = 0u; turn < CUTS; turn++) {
    let at = cuts(low, high);
    var above = vec4<f32>(0.0);
    for (var i = lid; i < p.count; i += 256u * AHEAD) {
#unroll q AHEAD
      let x_$q = near(i + 256u * $qu);
#end
#unroll q AHEAD
      let weight_$q = select(0.0, weight(x_$q, top, least), i + 256u * $qu < p.count);
      above += select(vec4<f32>(0.0), vec4<f32>(weight_$q), vec4<u32>(rank(x_$q)) > at);
#end
    }
    let heavy = select(vec4<u32>(0u), vec4<u32>(1u), sum_weights4(above, lid) >= vec4<f32>(limit));
    workgroupBarrier();
    let step = cut_step(low, high);
    low = min(low + step * (heavy.x + heavy.y + heavy.z + heavy.w), high);
    high = min(high, low + step - 1u);
  }
  return high;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  base = wg.x * p.count;
  let highest_rank = highest(lid);
  let is_odd = odd_logits[0] > 0u;
  let wanted_settings = settings[wg.x];
  temperature = wanted_settings.x;
  if (wanted_settings.x == 0.0) {  // greedy
    if (lid == 0u) { id[wg.x] = select(i32(places[0]), -1, is_odd); }
    return;
  }
  let top_k = u32(wanted_settings.y);
  let top = number(highest_rank);
  var least = 0u;
  if (top_k > 0u && top_k < p.count) { least = top_k_rank(highest_rank, top_k, lid); }
  if (wanted_settings.z < 1.0) { least = top_p_rank(highest_rank, least, wanted_settings.z, lid); }
  if (wanted_settings.w > 0.0) { least = max(least, rank(top + temperature * log(wanted_settings.w))); }

  // Each invocation sums a run of ids. The runs are added in order, and the one that holds the number is walked.
  let run = (p.count + 255u) / 256u;
  let first = min(lid * run, p.count);
  let last = min(first + run, p.count);
  var mine = 0.0;
  for (var i = first; i < last; i++) { mine += weight(logits[base + i], top, least); }
  weights[lid] = mine;
  workgroupBarrier();
  var before = 0.0;
  var wanted = 0.0;
  if (lid == 0u) {
    var total = 0.0;
    for (var i = 0u; i < 256u; i++) { total += weights[i]; }
    wanted = uniform_number[wg.x] * total;
    // If rounding leaves the number above the sum, the last run with any weight is taken.
    for (var i = 0u; i < 256u; i++) {
      if (weights[i] > 0.0) {
        places[0] = i;
        if (before + weights[i] > wanted) { break; }
        before += weights[i];
      }
    }
  }
  // All invocations weigh the tokens of that run, 256 at a time, and the first one walks them. If the loop above ran to
  // its end, `before` includes the run, and its last token is taken.
  let start = workgroupUniformLoad(&places[0]) * run;
  let end = min(start + run, p.count);
  var token = 0u;
  var found = false;
  for (var chunk = start; chunk < end; chunk += 256u) {
    workgroupBarrier();
    let at = chunk + lid;
    weights[lid] = 0.0;
    if (at < end) { weights[lid] = weight(logits[base + at], top, least); }
    workgroupBarrier();
    for (var i = 0u; lid == 0u && !found && i < 256u; i++) {
      if (weights[i] > 0.0) {
        token = chunk + i;
        before += weights[i];
        found = before > wanted;
      }
    }
  }
  if (lid == 0u) { id[wg.x] = select(i32(token), -1, is_odd); }
}
