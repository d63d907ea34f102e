// Element-wise operators, one entry point each. The variant with VEC = 4 takes four numbers at a time.
//   add: y = a + b.  add_to: y += b.  mul: y = a b.  scale: y = alpha a.  scale_by: y = a b[0].  convert: y = a.
//   softcap: y = alpha tanh(a / alpha).
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

#include "softcap.wgsl" of=a T=C_T
#include "elementwise_entry.wgsl" name=add first=a second=C_T(b[at$i]) value=a$i+b$i
#include "elementwise_entry.wgsl" name=add_to first=y second=C_T(b[at$i]) value=a$i+b$i
#include "elementwise_entry.wgsl" name=mul first=a second=C_T(b[at$i]) value=a$i*b$i
#include "elementwise_entry.wgsl" name=scale first=a second=C_T(p.alpha) value=a$i*b$i
#include "elementwise_entry.wgsl" name=scale_by first=a second=C_T(b[0]) value=a$i*b$i
#include "elementwise_entry.wgsl" name=convert first=a second=C_T(0.0) value=a$i
#include "elementwise_entry.wgsl" name=softcap first=a second=C_T(p.alpha) value=b$i*tanh_of_a(a$i/b$i)
#include "elementwise_entry.wgsl" name=mask first=a second=b[at$i] value=select(C_T(p.alpha),a$i,b$i!=B_T(0))
#include "elementwise_entry.wgsl" name=bias first=a second=C_T(b[at$i%p.columns]) value=a$i+b$i
