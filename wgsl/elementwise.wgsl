// Element-wise operators, one entry point each. The variant with VEC = 4 takes four numbers at a time.
//   add: y = a + b.  add_to: y += b.  mul: y = a b.  scale: y = alpha a.  scale_by: y = a b[0].  convert: y = a.
//   mask: y = a where b is non-zero, else alpha.  bias: y[r, c] = a[r, c] + b[c], c < columns.
//   a, y [n], b [n] ([1] scale_by, [columns] bias): A_T, B_T, Y_T are f32 or f16 or vec4 of them; b of mask is u32.
//   n and columns count elements of VEC numbers. C_T is f32 or vec4<f32>: all arithmetic.
// Dispatch: ceil(n / 1024) workgroups (folded), 4 elements an invocation, 256 apart; all loads stand before the first
// store, so that 64 bytes an invocation are under way at once.
struct Params { n: u32, columns: u32, alpha: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<A_T>;
@group(0) @binding(2) var<storage, read> b: array<B_T>;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

// The invocation's first element; loads are clamped to the last one, stores are guarded.
fn first(wg: vec3<u32>, nwg: vec3<u32>, lid: u32) -> u32 { return (wg.x + wg.y * nwg.x) * 1024u + lid; }

@compute @workgroup_size(256)
fn add(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
  let b$i = C_T(b[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i + b$i); }
#end
}

@compute @workgroup_size(256)
fn add_to(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let y$i = C_T(y[at$i]);
  let b$i = C_T(b[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(y$i + b$i); }
#end
}

@compute @workgroup_size(256)
fn mul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
  let b$i = C_T(b[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i * b$i); }
#end
}

@compute @workgroup_size(256)
fn scale(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i * p.alpha); }
#end
}

@compute @workgroup_size(256)
fn scale_by(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
  let factor = C_T(b[0]);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i * factor); }
#end
}

@compute @workgroup_size(256)
fn convert(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i); }
#end
}

@compute @workgroup_size(256)
fn mask(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
  let b$i = b[at$i];
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(select(C_T(p.alpha), a$i, b$i != B_T(0))); }
#end
}

@compute @workgroup_size(256)
fn bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = first(wg, nwg, lid);
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T(a[at$i]);
  let b$i = C_T(b[at$i % p.columns]);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(a$i + b$i); }
#end
}
