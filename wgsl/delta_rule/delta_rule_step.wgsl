// The gated delta rule token by token, on a state: S = exp(g) S + k (beta (v - exp(g) S' k))', y = S' q.
//
// qkv [batch, tokens, channels] QKV_T; g, beta_of [batch, tokens, heads] f32; doc_start [batch, tokens] i32; cache_len
// [1]; state [batch, heads, KEYS, VALUES] f32: overwritten; y [batch, tokens, heads, VALUES] Y_T.
// Dispatch: a workgroup per 64 of VALUES of each head. Four invocations share a column of the state.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> g: array<f32>;
@group(0) @binding(3) var<storage, read> beta_of: array<f32>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read_write> state: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<Y_T>;

const MOST_KEYS = 256u;
var<workgroup> q_of: array<f32, MOST_KEYS>;
var<workgroup> k_of: array<f32, MOST_KEYS>;
var<workgroup> partial: array<vec2<f32>, 256>;

// The sum over all invocations whose lid is equal modulo `width`; width = 1 sums over the workgroup.
fn summed(x: vec2<f32>, lid: u32, width: u32) -> vec2<f32> {
  workgroupBarrier();
  partial[lid] = x;
  workgroupBarrier();
  var sum = vec2<f32>(0.0);
  for (var n = lid % width; n < 256u; n += width) { sum += partial[n]; }
  return sum;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" each_column
  for (var t = 0u; t < p.tokens; t++) {
    var squares = vec2<f32>(0.0);
    workgroupBarrier();
    for (var d = lid; d < p.keys; d += 256u) {
      let x = vec2<f32>(f32(qkv[channel(t, key_head() * p.keys + d)]), f32(qkv[channel(t, key_width() + key_head() * p.keys + d)]));
      q_of[d] = x.x;
      k_of[d] = x.y;
      squares += x * x;
    }
    let unit = inverseSqrt(summed(squares, lid, 1u) + EPS);
    let gate = (row + t) * p.heads + head % p.heads;
    // The first token of a document starts without a state, and a token before its document adds nothing.
    let position = cache_len[0] + i32(t);
    let begins = doc_start[row + t];
    let kept = select(0.0, exp(g[gate]), begins < position);
    var read = 0.0;
    for (var d = first; d < last; d++) {
      let before = select(0.0, kept * state[(head * p.keys + d) * p.values + column], begins < position);
      read += k_of[d] * unit.y * before;
    }
    read = summed(vec2<f32>(read, 0.0), lid, 64u).x;
    let v = f32(qkv[channel(t, 2u * key_width() + head % p.heads * p.values + column)]);
    let correction = select(0.0, beta_of[gate] * (v - read), begins <= position);
    var output = 0.0;
    for (var d = first; d < last; d++) {
      let at = (head * p.keys + d) * p.values + column;
      let after = select(0.0, kept * state[at], begins < position) + k_of[d] * unit.y * correction;
      output += q_of[d] * unit.x * p.scale * after;
      if (there) { state[at] = after; }
    }
    output = summed(vec2<f32>(output, 0.0), lid, 64u).x;
    if (there && lid < 64u) { y[((row + t) * p.heads + head % p.heads) * p.values + c] = Y_T(output); }
  }
}
