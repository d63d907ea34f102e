// cache[b, cache_len + t, ...] = new[b, t, ...], in place.
//   cache [B, S, row], new [B, T, row] (row = G D), f32 or f16 (CACHE_T, NEW_T: vec4 where row is a multiple of 4; row
//   counts such elements); cache_len [1] i32. Rows beyond the cache's end are dropped.
// Dispatch: ceil(n / 256) workgroups (folded), n = B T row.
struct Params { n: u32, row: u32, keys: u32, tokens: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> cache: array<CACHE_T>;
@group(0) @binding(2) var<storage, read> fresh: array<NEW_T>;
@group(0) @binding(3) var<storage, read> cache_len: array<i32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at >= p.n) { return; }
  let token = at / p.row;
  let key = u32(cache_len[0]) + token % p.tokens;
  if (key < p.keys) { cache[(token / p.tokens * p.keys + key) * p.row + at % p.row] = CACHE_T(fresh[at]); }
}
