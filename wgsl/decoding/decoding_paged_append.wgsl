// Append keys and values to a paged cache. With n = b tokens + t, at = places[n] and page = pages[b, at / PAGE]:
//   keys[page, at % PAGE, g] = k[n, g], if ROTATED by row `at` of the tables (rope.wgsl); values[...] = v[n, g].
//   k, v [B T, G, D], keys, values [M, PAGE, G, D] X_T: f32 or f16, or vec4 of them; pages [B, W], places [B T] i32;
//   ROTATED: cos, sin [P, J] f32 (C_T). `half` (of D; all of it if not ROTATED) and `turning` (J) are in elements X_T.
// A place that is negative, or beyond the sequence's pages, is skipped. Eight storage buffers: all that WebGPU
// promises.
// Dispatch: ceil(2 items / 256) workgroups (folded), items = B T G half. Each of the first `items` invocations takes an
// element of k, or a pair to rotate; the others likewise of v.
struct Params { items: u32, groups: u32, half: u32, tokens: u32, pages: u32, turning: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> k: array<X_T>;
@group(0) @binding(2) var<storage, read> v: array<X_T>;
@group(0) @binding(3) var<storage, read> pages: array<i32>;
@group(0) @binding(4) var<storage, read> places: array<i32>;
@group(0) @binding(5) var<storage, read_write> keys: array<X_T>;
@group(0) @binding(6) var<storage, read_write> values: array<X_T>;
#if ROTATED
@group(0) @binding(7) var<storage, read> cosine: array<C_T>;
@group(0) @binding(8) var<storage, read> sine: array<C_T>;
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "rope.inc.wgsl" item
  let place = u32(places[token]);  // a negative one becomes larger than any place
  if (place >= p.pages * PAGE) { return; }
  let page = u32(pages[token / p.tokens * p.pages + place / PAGE]);
  let slot = (page * PAGE + place % PAGE) * p.groups + row % p.groups;
#if ROTATED
#include "rope.inc.wgsl" pair
  let src = row * 2u * p.half + left;
  let dst = slot * 2u * p.half + left;
  let position = place;
#include "rope.inc.wgsl" append
#else
  let dst = slot * p.half + j;
  if (at < p.items) { keys[dst] = k[item]; } else { values[dst] = v[item]; }
#endif
}
