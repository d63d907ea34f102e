// out = src, beside other work: few workgroups, so that most of the device is left to the launch that runs with them,
// and eight reads of an invocation under way, because main memory answers late.
//   src, out [units] of 16 bytes. Dispatch: any number of workgroups.
struct Params { units: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let last = p.units - 1u;
  for (var first = wg.x * 2048u + lid; first < p.units; first += nwg.x * 2048u) {
    // Beyond the end all are the last unit, which is read and written more than once: no branch parts the reads.
#unroll i 8
    let at$i = min(first + $i * 256u, last);
    let unit$i = src[at$i];
#end
#unroll i 8
    out[at$i] = unit$i;
#end
  }
}
