// Copies of experts' weights from slots or main memory to a place of their own, and to slots that they enter: operator
// gather_experts. As in moe_copy.wgsl, an invocation has four loads in flight.
//   origins [experts] vec2<i32>; source, out [experts, units], kept [slots, units] T: u32 or vec4<u32>. Without OUT,
//   only experts that enter a slot are copied
// Dispatch: (ceil(units / 1024), experts) workgroups of 256.
struct Params { units: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> origins: array<vec2<i32>>;
@group(0) @binding(2) var<storage, read> source: array<T>;
@group(0) @binding(3) var<storage, read_write> kept: array<T>;
#if OUT
@group(0) @binding(4) var<storage, read_write> out: array<T>;
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let slots = origins[wg.y];
#if OUT
  if (slots.x < -1) { return; }
#else
  if (slots.y < 0) { return; }
#endif
  let own = wg.y * p.units;
  let near = wg.x * 1024u + lid;
  var part: array<T, 4>;
  if (slots.x >= 0) {
    let from_slot = u32(slots.x) * p.units;
#unroll i 4
    part[$i] = kept[from_slot + min(near + $i * 256u, p.units - 1u)];
#end
  } else {
#unroll i 4
    part[$i] = source[own + min(near + $i * 256u, p.units - 1u)];
#end
  }
#if OUT
#unroll i 4
  out[own + min(near + $i * 256u, p.units - 1u)] = part[$i];
#end
#endif
  if (slots.y >= 0) {
    let to_slot = u32(slots.y) * p.units;
#unroll i 4
    kept[to_slot + min(near + $i * 256u, p.units - 1u)] = part[$i];
#end
  }
}
