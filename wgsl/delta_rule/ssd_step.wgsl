// Mamba-2's recurrence token by token, on a state: S = exp(g) S + B (dt x)', y = S' C + skip x.
//
// qkv [batch, tokens, channels] QKV_T: x, B and C; g, dt [batch, tokens, heads] f32; doc_start [batch, tokens] i32;
// cache_len [1]; skip [heads] f32; state [batch, heads, KEYS, VALUES] f32: overwritten; y [batch, tokens, heads,
// VALUES] Y_T.
// Dispatch: a workgroup per 64 of VALUES of each head. Four invocations share a column of the state.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> g: array<f32>;
@group(0) @binding(3) var<storage, read> dt: array<f32>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read> skip: array<f32>;
@group(0) @binding(7) var<storage, read_write> state: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<Y_T>;

const MOST_KEYS = 256u;
var<workgroup> c_of: array<f32, MOST_KEYS>;
var<workgroup> b_of: array<f32, MOST_KEYS>;
var<workgroup> partial: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" each_column
  for (var t = 0u; t < p.tokens; t++) {
    workgroupBarrier();
    for (var d = lid; d < p.keys; d += 256u) {
      c_of[d] = f32(qkv[channel(t, first_query() + key_head() * p.keys + d)]);
      b_of[d] = f32(qkv[channel(t, first_key() + key_head() * p.keys + d)]);
    }
    workgroupBarrier();
    let gate = (row + t) * p.heads + head % p.heads;
    // The first token of a document starts without a state, and a token before its document adds nothing.
    let position = cache_len[0] + i32(t);
    let begins = doc_start[row + t];
    let kept = exp(g[gate]);
    let x = f32(qkv[channel(t, first_value() + head % p.heads * p.values + column)]);
    let added = select(0.0, dt[gate] * x, begins <= position);
    var output = 0.0;
    for (var d = first; d < last; d++) {
      let at = (head * p.keys + d) * p.values + column;
      let after = select(0.0, kept * state[at], begins < position) + b_of[d] * added;
      output += c_of[d] * after;
      if (there) { state[at] = after; }
    }
    partial[lid] = output;
    workgroupBarrier();
    if (there && lid < 64u) {
      output = partial[lid] + partial[lid + 64u] + partial[lid + 128u] + partial[lid + 192u];
      y[((row + t) * p.heads + head % p.heads) * p.values + c] = Y_T(output + skip[head % p.heads] * x);
    }
  }
}
