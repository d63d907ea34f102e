// Peak rate of multiply-adds: 8 independent chains in registers, s = s * factor + factor, `passes` times 4.
//   out [256 workgroups] f32: the result, so that a compiler cannot drop the work.
// Dispatch: any number of workgroups. S_T: f32 or f16; V_T: vec4 of it.
struct Params { passes: u32, factor: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let factor = V_T(S_T(p.factor));
#unroll i 8
  var s_$i = V_T(S_T(f32((lid + $iu) % 61u)));
#end
  for (var n = 0u; n < p.passes; n++) {
#unroll r 4
#unroll i 8
    s_$i = fma(s_$i, factor, factor);
#end
#end
  }
  let all = ((s_0 + s_1) + (s_2 + s_3)) + ((s_4 + s_5) + (s_6 + s_7));
  out[wg.x * 256u + lid] = f32(all.x + all.y + all.z + all.w);
}
