// o[b, t, h] = sum_s w[s] part[s, b, t, h],  w[s] = exp(part_lse[s, b, h, t] - lse[b, h, t]),  lse = log sum_s
// exp(part_lse[s])
//
//   part f32 [splits, B, T, H, D], part_lse f32 [splits, B, H, T] -> o [B, T, H, D] (O_T), lse [B, H, T] f32
//   SEEN: doc_start and cache_len of attention_decode.wgsl, which tell how many splits were written
//
// Dispatch: ceil(B T H W / 256) workgroups (folded), W = D / 4 (VEC) or D; an invocation makes one element (vec4) of o.
// Dao et al., Flash-Decoding (2023).
#if SEEN
struct Params { batch: u32, queries: u32, heads: u32, splits: u32, keys: u32, window: u32 }
#else
struct Params { batch: u32, queries: u32, heads: u32, splits: u32 }
#endif
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> part: array<P_T>;
@group(0) @binding(2) var<storage, read> part_lse: array<f32>;
@group(0) @binding(3) var<storage, read_write> o: array<O_T>;
@group(0) @binding(4) var<storage, read_write> lse: array<f32>;

#if SEEN
@group(0) @binding(5) var<storage, read> doc_start: array<i32>;
@group(0) @binding(6) var<storage, read> cache_len: array<i32>;
#include "attention.inc.wgsl" seen
#include "attention.inc.wgsl" tiles_seen
#else
fn splits_seen(b: u32) -> u32 { return p.splits; }
#endif

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  let rows = p.batch * p.queries * p.heads;
  let row = at / ROW;  // (b T + t) H + h
  if (row >= rows) { return; }
  let bt = row / p.heads;
  let stat = (bt / p.queries * p.heads + row % p.heads) * p.queries + bt % p.queries;
  let splits = splits_seen(bt / p.queries);
  var highest = part_lse[stat];
  for (var s = 1u; s < splits; s++) { highest = max(highest, part_lse[s * rows + stat]); }
  var total = 0.0;
  var sum = P_T(0.0);
  for (var s = 0u; s < splits; s++) {
    let w = exp(part_lse[s * rows + stat] - highest);
    total += w;
    sum += part[s * rows * ROW + at] * w;
  }
  o[at] = O_T(sum / total);
  if (at % ROW == 0u) { lse[stat] = highest + log(total); }
}
