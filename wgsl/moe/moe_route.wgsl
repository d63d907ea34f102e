// The router of a mixture of experts.
//   main:     weights [rows, chosen] f32 and ids [rows, chosen] i32 of a row's largest logits, on a tie the lower id.
//             Weights are the softmax over the chosen ones (NORMALIZE) or over all. CHOSEN_BY: choose the largest of by
//             [rows, experts] f32 instead
//   backward: out [rows, experts] X_T, the gradient of logits, from that of the weights (given [rows, chosen] f32)
//   logits [rows, experts] X_T: f32 or f16
// Dispatch: a workgroup of 64 per row (folded).
struct Params { rows: u32, experts: u32, chosen: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<X_T>;
#if BACKWARD
@group(0) @binding(2) var<storage, read> given: array<f32>;
@group(0) @binding(3) var<storage, read> ids: array<i32>;
@group(0) @binding(4) var<storage, read_write> out: array<X_T>;
#else
@group(0) @binding(2) var<storage, read_write> weights: array<f32>;
@group(0) @binding(3) var<storage, read_write> ids: array<i32>;
#if CHOSEN_BY
@group(0) @binding(4) var<storage, read> by: array<f32>;
#endif
#endif

const LANES = 64u;
var<workgroup> values: array<f32, LANES>;
var<workgroup> places: array<u32, LANES>;
var<workgroup> picked: array<f32, MOST_CHOSEN>;

fn sum_of_all(value: f32, lid: u32) -> f32 {
  workgroupBarrier();
  values[lid] = value;
  workgroupBarrier();
  for (var width = LANES / 2u; width > 0u; width /= 2u) {
    if (lid < width) { values[lid] += values[lid + width]; }
    workgroupBarrier();
  }
  return values[0];
}

fn largest(value: f32, lid: u32) -> f32 {
  values[lid] = value;
  workgroupBarrier();
  for (var width = LANES / 2u; width > 0u; width /= 2u) {
    if (lid < width) { values[lid] = max(values[lid], values[lid + width]); }
    workgroupBarrier();
  }
  return values[0];
}

#if BACKWARD
@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = min(wg.x + wg.y * nwg.x, p.rows - 1u);
  let base = row * p.experts;
  let first = row * p.chosen;
  var top = f32(logits[base]);
  for (var e = lid; e < p.experts; e += LANES) { top = max(top, f32(logits[base + e])); }
  top = largest(top, lid);
  var sum = 0.0;
  for (var e = lid; e < p.experts; e += LANES) { sum += exp(f32(logits[base + e]) - top); }
  sum = sum_of_all(sum, lid);
  // A row has few of these, so every invocation adds them, in the same order.
  var of_chosen = 0.0;
  var mean = 0.0;
  for (var j = 0u; j < p.chosen; j++) {
    let x = exp(f32(logits[base + u32(ids[first + j])]) - top);
    of_chosen += x;
    mean += x * given[first + j];
  }
#if NORMALIZE
  let total = of_chosen;
#else
  let total = sum;
#endif
  mean /= total;
  for (var e = lid; e < p.experts; e += LANES) {
    let x = exp(f32(logits[base + e]) - top);
    var slope_of_e = 0.0;
    var is_chosen = false;
    for (var j = 0u; j < p.chosen; j++) {
      if (u32(ids[first + j]) == e) {
        slope_of_e = given[first + j];
        is_chosen = true;
      }
    }
    var grad = 0.0;
#if NORMALIZE
    if (is_chosen) { grad = x / total * (slope_of_e - mean); }
#else
    grad = x / total * (slope_of_e - mean);
#endif
    out[base + e] = X_T(grad);
  }
}
#else
@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = min(wg.x + wg.y * nwg.x, p.rows - 1u);
  let base = row * p.experts;
  var last = 0.0;
  var last_at = 0u;
  for (var j = 0u; j < p.chosen; j++) {
    // The largest after the one chosen before; p.experts stands for none.
    var best = 0.0;
    var at = p.experts;
    for (var e = lid; e < p.experts; e += LANES) {
#if CHOSEN_BY
      let x = by[base + e];
#else
      let x = f32(logits[base + e]);
#endif
      let comes = j == 0u || x < last || (x == last && e > last_at);
      if (comes && (at == p.experts || x > best)) {
        best = x;
        at = e;
      }
    }
    workgroupBarrier();
    values[lid] = best;
    places[lid] = at;
    workgroupBarrier();
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
      if (lid < width) {
        let other = values[lid + width];
        let there = places[lid + width];
        let mine = places[lid];
        let larger = other > values[lid] || (other == values[lid] && there < mine);
        if (there < p.experts && (mine == p.experts || larger)) {
          values[lid] = other;
          places[lid] = there;
        }
      }
      workgroupBarrier();
    }
    last = values[0];
    last_at = min(places[0], p.experts - 1u);  // among NaN there may be none
    if (lid == 0u) {
#if CHOSEN_BY
      picked[j] = f32(logits[base + last_at]);
#else
      picked[j] = last;
#endif
      ids[row * p.chosen + j] = i32(last_at);
    }
  }
  workgroupBarrier();
#if CHOSEN_BY
  var top = f32(logits[base]);
  for (var e = lid; e < p.experts; e += LANES) { top = max(top, f32(logits[base + e])); }
  top = largest(top, lid);
#else
  let top = picked[0];
#endif
  var total = 0.0;
#if NORMALIZE
  for (var j = 0u; j < p.chosen; j++) { total += exp(picked[j] - top); }
#else
  for (var e = lid; e < p.experts; e += LANES) { total += exp(f32(logits[base + e]) - top); }
  total = sum_of_all(total, lid);
#endif
  if (lid < p.chosen) { weights[row * p.chosen + lid] = exp(picked[lid] - top) / total; }
}
#endif
