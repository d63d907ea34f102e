// delta_rule_scan.wgsl on tensor cores: f16 operands, f32 states and sums. KEYS is 64 or 128, VALUES a multiple of 32.
//
// info, operands: of delta_rule_system.wgsl; values (plane 0): inverse beta v, overwritten with new; states: slot 0 is
// given, the others are overwritten. The next operands are loaded while the present ones are multiplied.
// Dispatch: a workgroup per 32 columns of VALUES of each head.
enable f16;
enable wgpu_cooperative_matrix;
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> info: array<f32>;
@group(0) @binding(2) var<storage, read> operands: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> states: array<vec4<f32>>;
#include "delta_rule_matrix.inc.wgsl" scan

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule_matrix.inc.wgsl" begin states=states slot=0u
  {
#include "delta_rule_matrix.inc.wgsl" read x=first number=DECAYED
#include "delta_rule_matrix.inc.wgsl" stage x=first width=16u ld=KEY_LD
  }
  for (var number = 0u; number < p.chunks; number++) {
    workgroupBarrier();
    choose(of_head, number);
    let whole = whole_chunk();
#include "delta_rule_matrix.inc.wgsl" read x=kept number=KEPT
#unroll m 2
    let at_$m = token(first_row + 32u * $mu, 0u) / 4u + column;
    let given_$m = values[at_$m];
#end
#include "delta_rule_matrix.inc.wgsl" by_state
#unroll m 2
    let new_$m = given_$m - strips[(first_row + 32u * $mu) * STRIP + place];
    values[at_$m] = new_$m;
    token_tile[(first_row + 32u * $mu) * RIGHT_LD + place] = vec4<f16>(new_$m);
#end
#include "delta_rule_matrix.inc.wgsl" stage x=kept width=(p.keys/4u) ld=TOKEN_LD
    choose(of_head, min(number + 1u, p.chunks - 1u));
#include "delta_rule_matrix.inc.wgsl" read x=next number=DECAYED
    workgroupBarrier();
#unroll h HALVES
    var more_$h = coop_mat16x16<f32, C>();
#end
#include "delta_rule_matrix.inc.wgsl" by_tokens what=kept
#include "delta_rule_matrix.inc.wgsl" next states=states slot=number+1u
#include "delta_rule_matrix.inc.wgsl" stage x=next width=16u ld=KEY_LD
  }
}
