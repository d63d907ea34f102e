// Cross-entropy of rows of logits, and its gradient, in place or in a float16 array (HALF).
//   logits [rows, V] f32: in: x W^T; out (GRAD): softmax(row) - onehot(target), 0 for an ignored row. With SOFTCAP > 0
//   the logits are SOFTCAP tanh(x W^T / SOFTCAP), which the first pass stores
//   grads [rows, V] f16 (HALF): the gradient times SCALE; then the logits are not overwritten by it
//   targets [N] i32 (IGNORE: -100), losses [N] f32; this dispatch computes rows first .. first + rows of them
// main:  one workgroup per row (folded); one pass for maximum and sum (online softmax, Milakov and Gimelshein 2018),
//        one to write. Each invocation has four loads in flight: rows are few, and with one load a large GPU reaches
//        a third of its memory bandwidth.
// total: one workgroup; total[0] = sum of losses, in a fixed order.
struct Params { rows: u32, v: u32, first: u32, n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> logits: array<L_T>;
@group(0) @binding(2) var<storage, read> targets: array<i32>;
@group(0) @binding(3) var<storage, read_write> losses: array<f32>;
@group(0) @binding(4) var<storage, read_write> sum_out: array<f32>;

#if HALF
enable f16;
@group(0) @binding(5) var<storage, read_write> grads: array<vec4<f16>>;
#endif

const IGNORE: i32 = -100;
const LOWEST: f32 = -3.0e38;
#if SOFTCAP
#include "common.inc.wgsl" softcap of=logits T=L_T
#endif
var<workgroup> part_max: array<f32, 256>;
var<workgroup> part_sum: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = wg.x + wg.y * nwg.x;
  if (row >= p.rows) { return; }
  let target_id = targets[p.first + row];
  let width = p.v / WIDTH;
  let base = row * width;
  if (target_id == IGNORE) {
    if (lid == 0u) { losses[p.first + row] = 0.0; }
#if GRAD
    for (var i = lid; i < width; i += 256u) { write_gradient(base + i, L_T(0.0)); }
#endif
    return;
  }
  var peak = LOWEST;
  var sum = 0.0;
  for (var i = lid; i < width; i += 1024u) {
#unroll q 4
    let at_$q = i + 256u * $qu;
    let read_$q = logits[base + min(at_$q, width - 1u)];
#end
#unroll q 4
    {
#if SOFTCAP
      let x = select(L_T(LOWEST), SOFTCAP * tanh_of_logits(read_$q / SOFTCAP), at_$q < width);
      if (at_$q < width) { logits[base + at_$q] = x; }
#else
      let x = select(L_T(LOWEST), read_$q, at_$q < width);
#endif
#if WIDTH == 4
      let local = max(max(x.x, x.y), max(x.z, x.w));
      let higher = max(peak, local);
      let e = exp(x - vec4<f32>(higher));
      sum = sum * exp(peak - higher) + ((e.x + e.y) + (e.z + e.w));
#else
      let higher = max(peak, x);
      sum = sum * exp(peak - higher) + exp(x - higher);
#endif
      peak = higher;
    }
#end
  }
  part_max[lid] = peak;
  part_sum[lid] = sum;
  for (var half = 128u; half > 0u; half >>= 1u) {
    workgroupBarrier();
    if (lid < half) {
      let other = part_max[lid + half];
      let higher = max(part_max[lid], other);
      part_sum[lid] = part_sum[lid] * exp(part_max[lid] - higher) + part_sum[lid + half] * exp(other - higher);
      part_max[lid] = higher;
    }
  }
#if SOFTCAP
  storageBarrier();  // the target's logit is read capped
#endif
  workgroupBarrier();
  let top = part_max[0];
  let total_sum = part_sum[0];
  let at = row * p.v + u32(target_id);
#if WIDTH == 4
  let target_logit = logits[at >> 2u][at & 3u];
#else
  let target_logit = logits[at];
#endif
  storageBarrier();  // all have read the target's logit before one overwrites it
  if (lid == 0u) { losses[p.first + row] = log(total_sum) + (top - target_logit); }
#if GRAD
  let inverse = 1.0 / total_sum;
  for (var i = lid; i < width; i += 1024u) {
#unroll q 4
    let at_$q = i + 256u * $qu;
    let read_$q = logits[base + min(at_$q, width - 1u)];
#end
#unroll q 4
    if (at_$q < width) {
      var g = exp(read_$q - L_T(top)) * inverse;
#if WIDTH == 4
      if (base + at_$q == at >> 2u) { g[at & 3u] -= 1.0; }
#else
      if (base + at_$q == at) { g -= 1.0; }
#endif
#if SOFTCAP
      g *= 1.0 - (read_$q / SOFTCAP) * (read_$q / SOFTCAP);
#endif
      write_gradient(base + at_$q, g);
    }
#end
  }
#endif
}

#if GRAD
fn write_gradient(at: u32, g: L_T) {
#if HALF
  grads[at] = vec4<f16>(g * SCALE);
#else
  logits[at] = g;
#endif
}
#endif

@compute @workgroup_size(256)
fn total(@builtin(local_invocation_index) lid: u32) {
  var sum = 0.0;
  for (var i = lid; i < p.n; i += 256u) { sum += losses[i]; }
  part_sum[lid] = sum;
  for (var half = 128u; half > 0u; half >>= 1u) {
    workgroupBarrier();
    if (lid < half) { part_sum[lid] += part_sum[lid + half]; }
  }
  if (lid == 0u) { sum_out[0] = part_sum[0]; }
}
