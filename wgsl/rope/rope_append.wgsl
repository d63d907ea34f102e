// Rotary embedding of new keys (rope.wgsl), appended with the new values to their caches:
//   keys[b, at, g] = rope(k)[n, g];   values[b, at, g] = v[n, g];   n = b tokens + t, at = cache_len + t
//   k, v [B T, G, D], keys, values [B, S, G, D] X_T: f32 or f16, or vec4 of it where D / 2 and J are multiples of 4;
//   cos, sin [P, J] f32 (C_T); positions [B T], cache_len [1] i32. `half` (of D) and `turning` (J) are in elements X_T.
// Rows beyond the cache's end are dropped. Eight storage buffers: all that WebGPU promises.
// Dispatch: ceil(2 items / 256) workgroups (folded), items = B T G half. Each of the first `items` invocations takes a
// pair of k, the others two elements of v.
// Source: Su et al., RoFormer (2021), in the half-split order of GPT-NeoX and Hugging Face.
struct Params { items: u32, groups: u32, half: u32, tokens: u32, keys: u32, turning: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> k: array<X_T>;
@group(0) @binding(2) var<storage, read> v: array<X_T>;
@group(0) @binding(3) var<storage, read> cosine: array<C_T>;
@group(0) @binding(4) var<storage, read> sine: array<C_T>;
@group(0) @binding(5) var<storage, read> positions: array<i32>;
@group(0) @binding(6) var<storage, read> cache_len: array<i32>;
@group(0) @binding(7) var<storage, read_write> keys: array<X_T>;
@group(0) @binding(8) var<storage, read_write> values: array<X_T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "rope.inc.wgsl" item
  let key = u32(cache_len[0]) + token % p.tokens;
  if (key >= p.keys) { return; }
#include "rope.inc.wgsl" pair
  let src = row * 2u * p.half + left;
  let dst = ((token / p.tokens * p.keys + key) * p.groups + row % p.groups) * 2u * p.half + left;
  let position = u32(positions[token]);
#include "rope.inc.wgsl" append
}
