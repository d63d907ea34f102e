// y[i] = table[ids[i]] for the ids inside the window of table rows [first, last).
//   table [V, columns] f32, or f16 / bf16 as pairs in u32 (KIND 0, 1, 2); TABLE_T: vec4<f32>, f32, vec2<u32> or u32;
//   ids [N] i32; y [N, columns] Y_T: f32 or f16, vec4 of it where columns divide by 4. columns counts elements of Y_T.
// Dispatch: ceil(n / 1024) workgroups (folded), n = N * columns; 4 elements an invocation, 256 apart.
struct Params { n: u32, columns: u32, first: u32, last: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> table: array<TABLE_T>;
@group(0) @binding(2) var<storage, read> ids: array<i32>;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

#if VEC == 4
fn load(at: u32) -> vec4<f32> {
#if KIND == 0
  return table[at];
#endif
#if KIND == 1
  let w = table[at];
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
#endif
#if KIND == 2
  let w = table[at];
  return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
#endif
}
#else
fn load(at: u32) -> f32 {
#if KIND == 0
  return table[at];
#endif
#if KIND == 1
  return unpack2x16float(table[at / 2u])[at & 1u];
#endif
#if KIND == 2
  let w = table[at / 2u];
  return bitcast<f32>(select(w << 16u, w & 0xffff0000u, (at & 1u) == 1u));
#endif
}
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let id$i = u32(ids[at$i / p.columns]);
  let inside$i = id$i >= p.first && id$i < p.last;
  let v$i = load(select(0u, id$i - p.first, inside$i) * p.columns + at$i % p.columns);
#end
#unroll i 4
  if (base + $i * 256u < p.n && inside$i) { y[at$i] = Y_T(v$i); }
#end
}
