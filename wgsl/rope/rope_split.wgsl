// Split the output of a fused qkv projection into queries, keys and values, with q and k rotated (rope.wgsl). JOIN, the
// backward, joins their gradients, with those of q and k rotated back.
//   qkv [N, H + 2 G, D], q [N, H, D], k, v [N, G, D] X_T: f32 or f16, or vec4 of it where D / 2 and J are multiples of
//   4; cos, sin [P, J] f32 (C_T); positions [N] i32. `half` (of D) and `turning` (J) count elements of X_T; `first` is
//   the first token of the window.
// Dispatch: ceil(N * (H + 2 G) * half / 256) workgroups (folded), one pair per invocation.
struct Params { items: u32, heads: u32, kv_heads: u32, half: u32, first: u32, turning: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(2) var<storage, read> cosine: array<C_T>;
@group(0) @binding(3) var<storage, read> sine: array<C_T>;
@group(0) @binding(4) var<storage, read> positions: array<i32>;
#if JOIN
@group(0) @binding(1) var<storage, read_write> qkv: array<X_T>;
@group(0) @binding(5) var<storage, read> q: array<X_T>;
@group(0) @binding(6) var<storage, read> k: array<X_T>;
@group(0) @binding(7) var<storage, read> v: array<X_T>;
#else
@group(0) @binding(1) var<storage, read> qkv: array<X_T>;
@group(0) @binding(5) var<storage, read_write> q: array<X_T>;
@group(0) @binding(6) var<storage, read_write> k: array<X_T>;
@group(0) @binding(7) var<storage, read_write> v: array<X_T>;
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let item = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (item >= p.items) { return; }
  let j = item % p.half;
  let row = item / p.half;
  let count = p.heads + 2u * p.kv_heads;
  let token = row / count;
  let head = row % count;
#include "rope.inc.wgsl" pair
  let entry = u32(positions[p.first + token]) * p.turning + column;
  let together = row * 2u * p.half + left;
  let c = select(C_T(1.0), cosine[entry], turns);
  let s = select(C_T(0.0), sine[entry], turns);
  if (head < p.heads) {
    let apart = (token * p.heads + head) * 2u * p.half + left;
#include pair x=q
  } else if (head < p.heads + p.kv_heads) {
    let apart = (token * p.kv_heads + head - p.heads) * 2u * p.half + left;
#include pair x=k
  } else {
    let apart = (token * p.kv_heads + head - p.heads - p.kv_heads) * 2u * p.half + left;
#if JOIN
    qkv[together] = v[apart];
    qkv[together + gap] = v[apart + gap];
#else
    v[apart] = qkv[together];
    v[apart + gap] = qkv[together + gap];
#endif
  }
}

#part pair x
// Part of rope_split.wgsl: a pair of the array $x.
#if JOIN
    let a = C_T($x[apart]);
    let b = C_T($x[apart + gap]);
    qkv[together] = X_T(a * c + b * s);
    qkv[together + gap] = X_T(b * c - a * s);
#else
    let a = C_T(qkv[together]);
    let b = C_T(qkv[together + gap]);
    $x[apart] = X_T(a * c - b * s);
    $x[apart + gap] = X_T(b * c + a * s);
#endif
#endpart
