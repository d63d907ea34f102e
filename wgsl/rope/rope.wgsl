// Rotary embedding, half-split: with j < J, c = cos[position, j], s = sin[position, j] (-s when INVERSE, the backward),
//   y[n, h, j] = x[n, h, j] c - x[n, h, j + J] s;   y[n, h, j + J] = x[n, h, j + J] c + x[n, h, j] s;
//   elements from 2 J on are copied. INTERLEAVED: 2 j and 2 j + 1 in place of j and j + J.
//   x, y [N, H, D] X_T: f32 or f16, or vec4 of it where D / 2 and J are multiples of 4; cos, sin [P, J] f32 (C_T);
//   positions [N] i32. `half` (of D) and `turning` (J) count elements of X_T; `first` is the first token of the window.
// An invocation rotates HEADS heads of one token at one j, with one read of the table: 2 HEADS loads in flight.
// Dispatch: ceil(N * ceil(H / HEADS) * half / 256) workgroups (folded).
// Source: Su et al., RoFormer (2021), in the half-split order of GPT-NeoX and Hugging Face.
struct Params { items: u32, heads: u32, head_blocks: u32, half: u32, first: u32, turning: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> cosine: array<C_T>;
@group(0) @binding(3) var<storage, read> sine: array<C_T>;
@group(0) @binding(4) var<storage, read> positions: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<X_T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let item = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (item >= p.items) { return; }
  let j = item % p.half;
  let block = item / p.half;
  let head = (block % p.head_blocks) * HEADS;
  let token = block / p.head_blocks;
#include "rope.inc.wgsl" pair
  let base = (token * p.heads + head) * 2u * p.half + left;
#unroll i HEADS
  let at$i = base + min($iu, p.heads - 1u - head) * 2u * p.half;
  let a$i = C_T(x[at$i]);
  let b$i = C_T(x[at$i + gap]);
#end
  let entry = u32(positions[p.first + token]) * p.turning + column;
  let c = select(C_T(1.0), cosine[entry], turns);
#if INVERSE
  let s = select(C_T(0.0), -sine[entry], turns);
#else
  let s = select(C_T(0.0), sine[entry], turns);
#endif
#unroll i HEADS
  if (head + $iu < p.heads) {
    y[at$i] = X_T(a$i * c - b$i * s);
    y[at$i + gap] = X_T(b$i * c + a$i * s);
  }
#end
}
