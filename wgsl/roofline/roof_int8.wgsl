// Peak rate of dot products of four 8-bit integers: 16 independent chains, s = s + (bytes of s) · factor, `passes`
// times 4.
//   out [256 workgroups] i32: the result, so that a compiler cannot drop the work.
// Dispatch: any number of workgroups.
struct Params { passes: u32, factor: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<i32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#unroll i 16
  var s_$i = i32(lid + $iu);
#end
  for (var n = 0u; n < p.passes; n++) {
#unroll r 4
#unroll i 16
    s_$i += dot4I8Packed(bitcast<u32>(s_$i), p.factor);
#end
#end
  }
  var all = 0;
#unroll i 16
  all ^= s_$i;
#end
  out[wg.x * 256u + lid] = all;
}
