// out[i] = sum_s part[s, i], in the order of s, for ARRAYS arrays of one size in one dispatch.
//
//   part f32 [splits, size], out [size] (OUT_T); size counts elements, or vec4 where it is a multiple of 4
//
// Dispatch: ceil(size / 256) workgroups (folded into x and y), z = ARRAYS.
struct Params { size: u32, splits: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> part0: array<P_T>;
@group(0) @binding(2) var<storage, read_write> out0: array<OUT_T0>;
#if ARRAYS == 2
@group(0) @binding(3) var<storage, read> part1: array<P_T>;
@group(0) @binding(4) var<storage, read_write> out1: array<OUT_T1>;
#endif

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at >= p.size) { return; }
#unroll i ARRAYS
  if (wg.z == $iu) {
    var sum = part$i[at];
    for (var s = 1u; s < p.splits; s++) { sum += part$i[s * p.size + at]; }
    out$i[at] = OUT_T$i(sum);
  }
#end
}
