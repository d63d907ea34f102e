// The next token's id from its logits, by one workgroup: greedy, or temperature, top-k and top-p, then the inverse of
// the cumulative distribution in id order.
//   logits [V] f32, uniform [1] f32 in [0, 1), id [1] i32.
// Nothing is sorted. Floats are compared by `rank`, an unsigned integer that rises with them, and a threshold is found by
// bisection on its 32 bits: top-k: the largest rank that at least k tokens reach; top-p: the smallest rank whose strictly
// more probable tokens weigh less than top_p together. So tokens of one value stay or go together.
// Dispatch: one workgroup of 256.
// Sources: Fan et al., Hierarchical Neural Story Generation (2018); Holtzman et al., Neural Text Degeneration (2020).
struct Params { count: u32, top_k: u32, temperature: f32, top_p: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> uniform_number: array<f32>;
@group(0) @binding(3) var<storage, read_write> id: array<i32>;

var<workgroup> ranks: array<u32, 256>;
var<workgroup> places: array<u32, 256>;
var<workgroup> weights: array<f32, 256>;

fn rank(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn number(r: u32) -> f32 { return bitcast<f32>(select(~r, r & 0x7fffffffu, (r & 0x80000000u) != 0u)); }

#include "reduce_workgroup.wgsl" name=sum_weights type=f32 tile=weights both=mine+other
#include "reduce_workgroup.wgsl" name=sum_counts type=u32 tile=ranks both=mine+other

// The highest rank and, in places[0], the lowest id that has it.
fn highest(lid: u32) -> u32 {
  var best = 0u;
  var place = 0u;
  for (var i = lid; i < p.count; i += 256u) {
    let r = rank(logits[i]);
    if (r > best) {
      best = r;
      place = i;
    }
  }
  ranks[lid] = best;
  places[lid] = place;
  workgroupBarrier();
  for (var width = 128u; width > 0u; width /= 2u) {
    if (lid < width) {
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

// Weight of a token, 1 for the most probable; 0 below the threshold.
fn weight(i: u32, top: f32, least: u32) -> f32 {
  let x = logits[i];
  return select(0.0, exp((x - top) / p.temperature), rank(x) >= least);
}

// The largest rank that at least k tokens reach.
fn top_k_rank(highest_rank: u32, lid: u32) -> u32 {
  var low = 0u;  // reached by all
  var high = highest_rank;
  for (var step = 0u; step < 32u; step++) {
    let middle = low + (high - low) / 2u + ((high - low) & 1u);
    var reached = 0u;
    for (var i = lid; i < p.count; i += 256u) { reached += select(0u, 1u, rank(logits[i]) >= middle); }
    let all_reached = sum_counts(reached, lid);
    workgroupBarrier();
    if (all_reached >= p.top_k) { low = middle; } else { high = max(middle, 1u) - 1u; }
  }
  return low;
}

// The smallest rank of at least `least` above which the tokens weigh less than top_p of all.
fn top_p_rank(highest_rank: u32, least: u32, lid: u32) -> u32 {
  let top = number(highest_rank);
  var mine = 0.0;
  for (var i = lid; i < p.count; i += 256u) { mine += weight(i, top, least); }
  let limit = p.top_p * sum_weights(mine, lid);
  workgroupBarrier();
  var low = least;
  var high = highest_rank;  // nothing is above it
  for (var step = 0u; step < 32u; step++) {
    let middle = low + (high - low) / 2u;
    var above = 0.0;
    for (var i = lid; i < p.count; i += 256u) { above += weight(i, top, max(middle + 1u, least)); }
    let all_above = sum_weights(above, lid);
    workgroupBarrier();
    if (all_above < limit) { high = middle; } else { low = min(middle + 1u, high); }
  }
  return high;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) lid: u32) {
  let highest_rank = highest(lid);
#if GREEDY
  if (lid == 0u) { id[0] = i32(places[0]); }
#else
  var least = 0u;
  if (p.top_k > 0u && p.top_k < p.count) { least = top_k_rank(highest_rank, lid); }
  if (p.top_p < 1.0) { least = top_p_rank(highest_rank, least, lid); }

  // Each invocation takes a run of ids; the runs are added up in order, and the one that holds the number is walked.
  let top = number(highest_rank);
  let run = (p.count + 255u) / 256u;
  let first = min(lid * run, p.count);
  let last = min(first + run, p.count);
  var mine = 0.0;
  for (var i = first; i < last; i++) { mine += weight(i, top, least); }
  weights[lid] = mine;
  workgroupBarrier();
  if (lid != 0u) { return; }
  var total = 0.0;
  for (var i = 0u; i < 256u; i++) { total += weights[i]; }
  let wanted = uniform_number[0] * total;
  var before = 0.0;
  var chosen = 0u;
  // The last run with any weight: rounding may leave the number above the sum.
  for (var i = 0u; i < 256u; i++) {
    if (weights[i] > 0.0) {
      chosen = i;
      if (before + weights[i] > wanted) { break; }
      before += weights[i];
    }
  }
  var token = 0u;
  // Where the loop above ran to its end, `before` counts the chosen run too; then its last token is taken below.
  for (var i = min(chosen * run, p.count); i < min(chosen * run + run, p.count); i++) {
    let w = weight(i, top, least);
    if (w > 0.0) {
      token = i;
      before += w;
      if (before > wanted) { break; }
    }
  }
  id[0] = i32(token);
#endif
}
