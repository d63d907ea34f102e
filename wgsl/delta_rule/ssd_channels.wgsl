// Write the gradients of Mamba-2's recurrence to their arrays: of B and C, summed over the heads of a group; of x,
// through the state and, by skip, through the output; of g, dt and skip, per token.
//
// qkv [batch, tokens, channels] QKV_T; info; values: plane 1 is the gradient of new; dqk [batch heads, chunks CHUNK, 2
// KEYS] f32; dy [batch, tokens, heads, VALUES] DY_T; skip [heads] f32; dqkv like qkv, dgates f32, three arrays [batch,
// tokens, heads] that begin at a multiple of 64 numbers: overwritten for the tokens of the segment.
// Dispatch: a workgroup per token of a sequence.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> info: array<f32>;
@group(0) @binding(2) var<storage, read> values: array<f32>;
@group(0) @binding(3) var<storage, read> dqk: array<f32>;
@group(0) @binding(4) var<storage, read> dy: array<DY_T>;
@group(0) @binding(5) var<storage, read> skip: array<f32>;
@group(0) @binding(6) var<storage, read_write> dqkv: array<QKV_T>;
@group(0) @binding(7) var<storage, read_write> dgates: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" each_token
  let share = p.heads / p.key_heads;
  for (var n = lid; n < 2u * key_width(); n += 256u) {
    let of_query = n < key_width();
    let c = n % key_width();
    let d = c % p.keys + select(p.keys, 0u, of_query);
    var sum = 0.0;
    for (var s = 0u; s < share; s++) {
      let of_head = b * p.heads + c / p.keys * share + s;
      sum += dqk[((of_head * p.chunks + chunk) * CHUNK + i) * 2u * p.keys + d];
    }
    dqkv[channel(i, select(first_key(), first_query(), of_query) + c)] = QKV_T(sum);
  }
  for (var n = lid; n < p.heads * p.values; n += 256u) {
    choose(b * p.heads + n / p.values, chunk);
    let direct = skip[n / p.values] * f32(dy[(row + i) * p.heads * p.values + n]);
    dqkv[channel(i, first_value() + n)] = QKV_T(info[plane(1u, i)] * values[second(i, n % p.values)] + direct);
  }
  let stride = (p.batch * p.tokens * p.heads + 63u) / 64u * 64u;
  for (var n = lid; n < p.heads; n += 256u) {
    choose(b * p.heads + n, chunk);
#unroll k 3
    dgates[$ku * stride + (row + i) * p.heads + n] = info[plane(5u + $ku, i)];
#end
  }
}
