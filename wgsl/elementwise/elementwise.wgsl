// Element-wise operators, one entry point each.
//   add: y = a + b.  add_to: y += b.  mul: y = a b.  scale: y = alpha a.  scale_by: y = a b[0].  convert: y = a.
//   softcap: y = alpha tanh(a / alpha).
//   mask: y = a where b is non-zero, else alpha.  bias: y[r, c] = a[r, c] + b[c], c < columns.
//   a, y [n], b [n] ([1] scale_by, [columns] bias): A_T, B_T, Y_T are f32 or f16 or vec4 of them; b of mask is u32.
//   n and columns count such elements. C_T, the type of all arithmetic, is f32 or vec4<f32>.
// Dispatch: ceil(n / 1024) workgroups (folded), 4 elements per invocation, 256 apart. All loads precede the first
// store, so that each invocation has 64 bytes in flight.
struct Params { n: u32, columns: u32, alpha: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<A_T>;
@group(0) @binding(2) var<storage, read> b: array<B_T>;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

#include "common.inc.wgsl" softcap of=a T=C_T
#include entry name=add first=a second=C_T(b[at$i]) value=a$i+b$i
#include entry name=add_to first=y second=C_T(b[at$i]) value=a$i+b$i
#include entry name=mul first=a second=C_T(b[at$i]) value=a$i*b$i
#include entry name=scale first=a second=C_T(p.alpha) value=a$i*b$i
#include entry name=scale_by first=a second=C_T(b[0]) value=a$i*b$i
#include entry name=convert first=a second=C_T(0.0) value=a$i
#include entry name=softcap first=a second=C_T(p.alpha) value=b$i*tanh_of_a(a$i/b$i)
#include entry name=mask first=a second=b[at$i] value=select(C_T(p.alpha),a$i,b$i!=B_T(0))
#include entry name=bias first=a second=C_T(b[at$i%p.columns]) value=a$i+b$i

#part entry name first second value
// An entry point of elementwise.wgsl: y = $value of a$i, elements of $first, and b$i, which is $second.
// Loads are clamped to the last element, stores are guarded.
@compute @workgroup_size(256)
fn $name(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let a$i = C_T($first[at$i]);
  let b$i = $second;
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T($value); }
#end
}
#endpart
