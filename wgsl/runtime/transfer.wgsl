// out = src, concurrently with other work. It has few workgroups, to leave most of the device to the launch that runs
// with them, and eight loads in flight per invocation, because host memory has a long latency.
//   src, out [units] of 16 bytes. Dispatch: any number of workgroups.
struct Params { units: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let last = p.units - 1u;
  for (var first = wg.x * 2048u + lid; first < p.units; first += nwg.x * 2048u) {
    // Beyond the end, the last unit is read and written again, so that no branch separates the loads.
#unroll i 8
    let at$i = min(first + $i * 256u, last);
    let unit$i = src[at$i];
#end
#unroll i 8
    out[at$i] = unit$i;
#end
  }
}
