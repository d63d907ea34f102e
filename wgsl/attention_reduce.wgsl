// out[i] = sum_s part[s, i], in the order of s.
//
//   part f32 [splits, size], out [size] (OUT_T); size in elements or, where it divides by 4, vec4s
//
// Dispatch: ceil(size / 256) workgroups (folded).
struct Params { size: u32, splits: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> part: array<P_T>;
@group(0) @binding(2) var<storage, read_write> out: array<OUT_T>;

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at >= p.size) { return; }
  var sum = part[at];
  for (var s = 1u; s < p.splits; s++) { sum += part[s * p.size + at]; }
  out[at] = OUT_T(sum);
}
