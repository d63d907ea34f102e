// Copies of experts' weights to slots: operator copy_experts. Main memory has a long latency, so an invocation has four
// loads in flight.
//   copies [pairs, 2] i32: expert and slot; source [experts, units], out [slots, units] T: u32 or vec4<u32>
// Dispatch: (ceil(units / 1024), pairs) workgroups of 256.
struct Params { units: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> copies: array<vec2<i32>>;
@group(0) @binding(2) var<storage, read> source: array<T>;
@group(0) @binding(3) var<storage, read_write> out: array<T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let pair = copies[wg.y];
  if (pair.x < 0) { return; }
  let begin = u32(pair.x) * p.units;
  let begin_out = u32(pair.y) * p.units;
  let first = wg.x * 1024u + lid;
#unroll i 4
  let at$i = min(first + $i * 256u, p.units - 1u);  // beyond the end, the last unit again
  let unit$i = source[begin + at$i];
#end
#unroll i 4
  out[begin_out + at$i] = unit$i;
#end
}
