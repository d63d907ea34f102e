// y[i] = table[ids[i]] for the ids inside the window of table rows [first, last).
//   table [V, columns] f32, f16 or bf16 (KIND 0, 1, 2), read four at once where columns is a multiple of 4 (VEC4);
//   ids [N] i32; y [N, columns] Y_T: f32 or f16, or vec4 of it with VEC4. columns counts elements of Y_T.
// Dispatch: ceil(n / 1024) workgroups (folded), n = N * columns; 4 elements per invocation, 256 apart.
struct Params { n: u32, columns: u32, first: u32, last: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(2) var<storage, read> ids: array<i32>;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

#include "common.inc.wgsl" dense x=table binding=1 kind=KIND vec=VEC4

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let id$i = u32(ids[at$i / p.columns]);
  let inside$i = id$i >= p.first && id$i < p.last;
  let v$i = read_table(select(0u, id$i - p.first, inside$i) * p.columns + at$i % p.columns);
#end
#unroll i 4
  if (base + $i * 256u < p.n && inside$i) { y[at$i] = Y_T(v$i); }
#end
}
