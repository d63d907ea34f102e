// Probe the subgroups of a kernel with cooperative matrices, and check one matmul of each.
//   lanes [64] u32: for each invocation (subgroup size * 256 + lane) * 256 + subgroup
//   out [subgroups, 16, 16] f32: A B, computed by each subgroup. Element n of A is n % 13, of B n % 11: sums are exact.
// A compiler may choose another subgroup size for a kernel without cooperative operations, so this one has both.
// Dispatch: 1 workgroup.
enable f16;
enable wgpu_cooperative_matrix;

struct Params { zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> lanes: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

// Two matrices with rows of 16, as the kernels have them: array and pointer to a member.
#include "common.inc.wgsl" eight
var<workgroup> factors: array<Eight, 2u * 32u>;
var<workgroup> sums: array<vec4<f32>, 8u * 64u>;

@compute @workgroup_size(64)
fn main(
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_id) subgroup_id: u32,
  @builtin(subgroup_invocation_id) subgroup_invocation_id: u32,
) {
  let first = 8u * (lid % 32u) + p.zero;
  let factor = select(13u, 11u, lid >= 32u);
  let low = (vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u)) % vec4<u32>(factor);
  let high = (vec4<u32>(first) + vec4<u32>(4u, 5u, 6u, 7u)) % vec4<u32>(factor);
  factors[lid] = Eight(vec4<f16>(vec4<f32>(low)), vec4<f16>(vec4<f32>(high)));
  lanes[lid] = (subgroup_size * 256u + subgroup_invocation_id) * 256u + subgroup_id;
  workgroupBarrier();
  let ld = 4u;
  let a_at_0 = 0u;
  let a = coopLoadT<coop_mat16x16<f16, A>>(&factors[a_at_0].low, ld);
  let b_at_0 = 32u;
  let b = coopLoadT<coop_mat16x16<f16, B>>(&factors[b_at_0].low, ld);
  var acc = coop_mat16x16<f32, C>();
  acc = coopMultiplyAdd(a, b, acc);
  let sum_at = min(subgroup_id, 7u) * 64u;
  coopStoreT(acc, &sums[sum_at], ld);
  workgroupBarrier();
#unroll i 8
  out[64u * $iu + lid] = sums[64u * $iu + lid];
#end
}
