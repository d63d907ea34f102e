// delta_rule_scan_backward.wgsl on tensor cores, built like delta_rule_scan_matrix.wgsl.
//
// info, operands: of delta_rule_system.wgsl; dy [batch, tokens, heads, VALUES] f16; values: plane 1 is scores' dy, and
// overwritten with to_new; dstates: the last slot is given, the others are overwritten.
// Dispatch: a workgroup per 32 columns of VALUES of each head.
enable f16;
enable wgpu_cooperative_matrix;
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> info: array<f32>;
@group(0) @binding(2) var<storage, read> operands: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read> dy: array<vec4<f16>>;
@group(0) @binding(4) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> dstates: array<vec4<f32>>;
#include "delta_rule_matrix.inc.wgsl" scan

// Not 0 beyond the last token: its left operand is.
fn output_gradient(i: u32) -> vec4<f16> {
  return dy[((row + min(i, count - 1u)) * p.heads + head % p.heads) * values4() + column];
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule_matrix.inc.wgsl" begin states=dstates slot=p.chunks
  choose(of_head, p.chunks - 1u);
  {
#include "delta_rule_matrix.inc.wgsl" read x=first number=ASKED
#include "delta_rule_matrix.inc.wgsl" stage x=first width=(p.keys/4u) ld=TOKEN_LD
  }
#unroll m 2
  token_tile[(first_row + 32u * $mu) * RIGHT_LD + place] = output_gradient(first_row + 32u * $mu);
#end
  for (var after = p.chunks; after > 0u; after--) {
    workgroupBarrier();
    choose(of_head, after - 1u);
    let whole = whole_chunk();
#include "delta_rule_matrix.inc.wgsl" read x=kept number=KEPT_ACROSS
#unroll m 2
    let at_$m = second(first_row + 32u * $mu, 0u) / 4u + column;
    let given_$m = values[at_$m];
#end
#unroll h HALVES
    var more_$h = coop_mat16x16<f32, C>();
#end
#include "delta_rule_matrix.inc.wgsl" by_tokens what=asked
    workgroupBarrier();
#include "delta_rule_matrix.inc.wgsl" stage x=kept width=16u ld=KEY_LD
#include "delta_rule_matrix.inc.wgsl" read x=along number=DECAYED_ALONG
    workgroupBarrier();
#include "delta_rule_matrix.inc.wgsl" by_state
#unroll m 2
    let to_new_$m = given_$m + strips[(first_row + 32u * $mu) * STRIP + place];
    values[at_$m] = to_new_$m;
    token_tile[(first_row + 32u * $mu) * RIGHT_LD + place] = vec4<f16>(-to_new_$m);
#end
#include "delta_rule_matrix.inc.wgsl" stage x=along width=(p.keys/4u) ld=TOKEN_LD
    choose(of_head, max(after, 2u) - 2u);
#include "delta_rule_matrix.inc.wgsl" read x=next number=ASKED
#unroll m 2
    let next_dy_$m = output_gradient(first_row + 32u * $mu);
#end
    workgroupBarrier();
#include "delta_rule_matrix.inc.wgsl" by_tokens what=along
#include "delta_rule_matrix.inc.wgsl" next states=dstates slot=after-1u
#include "delta_rule_matrix.inc.wgsl" stage x=next width=(p.keys/4u) ld=TOKEN_LD
#unroll m 2
    token_tile[(first_row + 32u * $mu) * RIGHT_LD + place] = next_dy_$m;
#end
  }
}
