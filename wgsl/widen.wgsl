// y = x for x bfloat16 (a float32 without its lower 16 bits).
//   x [n] bf16, two in a u32 (X_T: vec2<u32> for four of them, or u32); y [n] f32 or f16 (Y_T: vec4 of it, or one).
// Dispatch: ceil(n / VEC / 1024) workgroups (folded), 4 elements of VEC numbers an invocation, 256 apart.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read_write> y: array<Y_T>;

#if VEC == 4
fn load(i: u32) -> vec4<f32> {
  let w = x[i];
  return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
#else
fn load(i: u32) -> f32 {
  let w = x[i / 2u];
  return bitcast<f32>(select(w << 16u, w & 0xffff0000u, (i & 1u) == 1u));
}
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let x$i = load(at$i);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(x$i); }
#end
}
