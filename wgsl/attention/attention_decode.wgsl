// attention.wgsl for few queries and many keys: one workgroup has all ROWS = T H / G queries of a key/value head, so
// that each key is read once.
//
//   q [B, T, H, D], k v [B, S, G, D] float32 or float16; doc_start [B, T] i32; cache_len [1] i32
//   PAGED: T = 1, k v [M, KEYS, G, D] in pages. doc_start holds the pages of each sequence [B, S / KEYS], and cache_len
//   the position of its query [B]. The queries of a key/value head may be split among PARTS workgroups.
//   o f32 [splits, B, T, H, D] and lse f32 [splits, B, H, T], each split normalized on its own, for
//   attention_combine.wgsl; with splits = 1 the results themselves. Splits beyond those with a key are not written.
//
// Dispatch: splits * G * B workgroups (folded) of 128. A workgroup walks every `splits`-th tile of 64 visible keys.
// Scores: 4 invocations per key; softmax: 16 invocations per row; output: COLUMNS invocations across D, 128 / COLUMNS
// keys at a time. Memory-bound: 16 bytes per load.
//
// Dao et al., Flash-Decoding (2023).
#include "attention.inc.wgsl" forward
#include "attention.inc.wgsl" tiles_seen

const AT_ONCE: u32 = 128u / COLUMNS;

var<workgroup> q_tile: array<array<vec4<f32>, W4_PADDED>, ROWS>;
var<workgroup> part_tile: array<array<array<f32, 5>, KEYS>, ROWS>;  // quarters of a score; padded to 5 for the banks
var<workgroup> p_tile: array<array<f32, KEYS>, ROWS>;
var<workgroup> reduce_tile: array<array<f32, 16>, 8>;
var<workgroup> shrink_tile: array<f32, 8>;
var<workgroup> out_tile: array<array<vec4<f32>, COLUMNS>, AT_ONCE>;

#if PAGED
fn row_of(key: u32, kv_head: u32) -> u32 { return key * (p.kv_heads / PARTS) + kv_head / PARTS; }
#else
fn row_of(key: u32, kv_head: u32) -> u32 { return key * p.kv_heads + kv_head; }
#endif

@compute @workgroup_size(128)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  var id = wg.x + wg.y * nwg.x;
  if (id >= p.splits * p.kv_heads * p.batch) { return; }
  let split = id % p.splits;
  id /= p.splits;
  let kv_head = id % p.kv_heads;
  let b = id / p.kv_heads;
  let group = p.heads / p.kv_heads;
  if (split >= splits_seen(b)) { return; }
  let first_position = first_position_of(b);
  let end_key = end_key_of(b);

  // Row r is query r / group of head kv_head * group + r % group.
  for (var at = lid; at < ROWS * W4_PADDED; at += 128u) {
    let r = at / W4_PADDED;
    let row = (b * p.queries + r / group) * p.heads + kv_head * group + r % group;
    q_tile[r][at % W4_PADDED] = load_q(row, at % W4_PADDED) * (p.scale * LOG2E);
  }

  // This invocation's row of the softmax. With fewer than 8 rows, some invocations idle.
  let r_mine = lid / 16u;
  let t_mine = min(r_mine, ROWS - 1u) / group;
  let high = min(first_position + t_mine, p.keys - 1u);
  let low = first_seen(start_of(b, t_mine), first_position + t_mine);
  var row_max = FLOOR;
  var row_sum = 0.0;

  let column = lid % COLUMNS;
  let key_group = lid / COLUMNS;
  var acc: array<vec4<f32>, ROWS>;
#unroll r ROWS
  acc[$r] = vec4<f32>(0.0);
#end

  for (var tile = first_tile_of(b) + split; tile * KEYS < end_key; tile += p.splits) {
    let j0 = tile * KEYS;
#if PAGED
    let first_row = u32(doc_start[b * (p.keys / KEYS) + tile]) * KEYS;
#else
    let first_row = b * p.keys + j0;
#endif
    workgroupBarrier();
#unroll pass 2
    {
      let key = $passu * 32u + lid / 4u;
      var dots: array<f32, ROWS>;
#unroll r ROWS
      dots[$r] = 0.0;
#end
      if (j0 + key < end_key) {
        let row = row_of(first_row + key, kv_head);
#unroll step STEPS
        {
          let c = lid % 4u + 4u * $stepu;
          let x = load_k(row, c);
#unroll r ROWS
          dots[$r] += dot(q_tile[$r][c], x);
#end
        }
#end
      }
#unroll r ROWS
      part_tile[$r][key][lid % 4u] = dots[$r];
#end
    }
#end
    workgroupBarrier();

    var s = vec4<f32>(MASKED);
    if (r_mine < ROWS) {
#unroll e 4
      {
        let key = lid % 16u + 16u * $eu;
        if (j0 + key >= low && j0 + key <= high) {
          let quarters = part_tile[r_mine][key];
          s[$e] = quarters[0] + quarters[1] + quarters[2] + quarters[3];
        }
      }
#end
#if SOFTCAP
      s = select(capped(s), s, s == vec4<f32>(MASKED));
#endif
    }
    reduce_tile[r_mine][lid % 16u] = max(max(s.x, s.y), max(s.z, s.w));
    workgroupBarrier();
    var m = row_max;
    for (var x = 0u; x < 16u; x++) { m = max(m, reduce_tile[r_mine][x]); }
    let weights = exp2(s - vec4<f32>(m));
    let shrink = exp2(row_max - m);
    row_max = m;
    row_sum = row_sum * shrink + (weights.x + weights.y + weights.z + weights.w);
    if (lid % 16u == 0u) { shrink_tile[r_mine] = shrink; }
    if (r_mine < ROWS) {
#unroll e 4
      p_tile[r_mine][lid % 16u + 16u * $eu] = weights[$e];
#end
    }
    workgroupBarrier();

#unroll r ROWS
    acc[$r] *= shrink_tile[$r];
#end
#unroll n KEY_STEPS
    {
      let key = key_group + AT_ONCE * $nu;
      if (j0 + key < end_key) {  // beyond it there may be NaN, and 0 times NaN is not 0
        let x = load_v(row_of(first_row + key, kv_head), column);
#unroll r ROWS
        acc[$r] += p_tile[$r][key] * x;
#end
      }
    }
#end
  }

  workgroupBarrier();
  reduce_tile[r_mine][lid % 16u] = row_sum;
  workgroupBarrier();
  if (lid % 16u == 0u && r_mine < ROWS) {
    var total = 0.0;
    for (var x = 0u; x < 16u; x++) { total += reduce_tile[r_mine][x]; }
    let head = kv_head * group + r_mine % group;
    lse[((split * p.batch + b) * p.heads + head) * p.queries + t_mine] = LN2 * (row_max + log2(max(total, 1e-30)));
    shrink_tile[r_mine] = select(0.0, 1.0 / total, total > 0.0);
  }
#unroll r ROWS
  workgroupBarrier();
  out_tile[key_group][column] = acc[$r];
  workgroupBarrier();
  if (lid < COLUMNS) {
    var sum = out_tile[0][lid];
    for (var x = 1u; x < AT_ONCE; x++) { sum += out_tile[x][lid]; }
    let row = ((split * p.batch + b) * p.queries + $ru / group) * p.heads + kv_head * group + $ru % group;
    store_o(row, lid, sum * shrink_tile[$r]);
  }
#end
}
