// Write the gradients of the gated delta rule to their arrays: of q and k, summed over the heads that share them and
// taken through the normalization, dx = (dx1 - x1 (x1 dx1)) / |x|; of v, beta to_rhs; of the gates, copied from `info`.
//
// qkv [batch, tokens, channels] QKV_T; info; values: plane 1 is to_rhs; dqk [batch heads, chunks CHUNK, 2 KEYS] f32;
// dqkv like qkv, dg and dbeta [batch, tokens, heads] f32: overwritten for the tokens of the segment.
// Dispatch: a workgroup per token of a sequence. 32 invocations take a key head of q or k.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> info: array<f32>;
@group(0) @binding(3) var<storage, read> values: array<f32>;
@group(0) @binding(4) var<storage, read> dqk: array<f32>;
@group(0) @binding(5) var<storage, read_write> dqkv: array<QKV_T>;
@group(0) @binding(6) var<storage, read_write> dg: array<f32>;
@group(0) @binding(7) var<storage, read_write> dbeta: array<f32>;

var<workgroup> partial: array<f32, 256>;

// The gradient of element d of q (which = 0) or k (1), summed over the heads of a key head.
fn shared_gradient(b: u32, i: u32, key_head_of: u32, which: u32, d: u32) -> f32 {
  let share = p.heads / p.key_heads;
  var sum = 0.0;
  for (var n = 0u; n < share; n++) {
    let of_head = b * p.heads + key_head_of * share + n;
    sum += dqk[((of_head * p.chunks + chunk) * CHUNK + i) * 2u * p.keys + which * p.keys + d];
  }
  return sum;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" each_token
  let lane = lid % 32u;
  for (var first = 0u; first < 2u * p.key_heads; first += 8u) {
    let part = first + lid / 32u;
    let there = part < 2u * p.key_heads;
    let which = min(part, 2u * p.key_heads - 1u) / p.key_heads;
    let of_key = part % p.key_heads;
    choose(b * p.heads + of_key * (p.heads / p.key_heads), chunk);
    let unit = info[plane(2u + which, i)];
    let at = channel(i, which * key_width() + of_key * p.keys);
    var sum = 0.0;
    for (var d = lane; d < p.keys && there; d += 32u) { sum += shared_gradient(b, i, of_key, which, d) * f32(qkv[at + d]) * unit; }
    workgroupBarrier();
    partial[lid] = sum;
    workgroupBarrier();
    var along = 0.0;
    for (var n = 0u; n < 32u; n++) { along += partial[lid - lane + n]; }
    // `unit` of q includes the scale, and so does its gradient.
    let inverse = select(1.0, 1.0 / p.scale, which == 0u);
    for (var d = lane; d < p.keys && there; d += 32u) {
      let own = f32(qkv[at + d]) * unit * inverse;
      dqkv[at + d] = QKV_T(unit * (shared_gradient(b, i, of_key, which, d) - own * along * inverse));
    }
  }
  for (var n = lid; n < p.heads * p.values; n += 256u) {
    choose(b * p.heads + n / p.values, chunk);
    dqkv[channel(i, 2u * key_width() + n)] = QKV_T(info[plane(1u, i)] * values[second(i, n % p.values)]);
  }
  for (var n = lid; n < p.heads; n += 256u) {
    choose(b * p.heads + n, chunk);
    dg[(row + i) * p.heads + n] = info[plane(5u, i)];
    dbeta[(row + i) * p.heads + n] = info[plane(6u, i)];
  }
}
