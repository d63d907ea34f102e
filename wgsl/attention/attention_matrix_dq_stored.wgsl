// dq on tensor cores from the ds that attention_matrix_dkv.wgsl has stored: dq = scale ds k, with f16 k and f32 sums.
// Heads have WIDTH elements, a multiple of 32.
//
//   ds [B, H] x rows of 16 queries, one per key, k [B, T, G, D], doc_start [B, T] -> dq [B, T, H, D]
//
// ds of 16 queries lies together, of all keys up to the end of their tile of KEYS; what no query of a tile sees is not
// written. A workgroup owns BM queries of one head and walks tiles of BN keys. Its subgroups are in two columns of
// BM / ROW_BLOCKS / 16 rows, and each has ROW_BLOCKS x COLUMN_BLOCKS matrices of sums.
// Dispatch: workgroups `first` to `end` of query tiles x batch x heads, the longest first.
enable f16;
enable wgpu_cooperative_matrix;

struct Params {
  queries: u32, heads: u32, kv_heads: u32, query_tiles: u32, key_tiles: u32, window: u32,
  batch_first: u32, batch_count: u32, kv_first: u32, kv_count: u32,  // of this launch
  scale: f32, first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ds: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> doc_start: array<i32>;
@group(0) @binding(4) var<storage, read_write> dq: array<DQ_T>;

#include "attention.inc.wgsl" seen
#include "common.inc.wgsl" eight

const THREADS: u32 = $LANESu * SG;
const BM: u32 = 8u * SG * ROW_BLOCKS;
const M8: u32 = BM / 8u;
const W8: u32 = WIDTH / 8u;
// Row lengths in eights and in vec4, padded so that neighboring rows start in different banks.
const DS_LD: u32 = M8 + 1u;
const K_LD: u32 = W8 + 1u;
const S_LD: u32 = 6u;

var<workgroup> ds_tile: array<Eight, BN * DS_LD>;  // a row is a key
var<workgroup> k_tile: array<Eight, BN * K_LD>;
var<workgroup> strips: array<vec4<f32>, 16u * SG * S_LD>;

@compute @workgroup_size(THREADS)
fn main(
#include "attention_matrix.inc.wgsl" builtins
) {
  var id = p.first + wg.x + wg.y * nwg.x;
  let last_id = p.end - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
  let group = p.heads / p.kv_heads;
  let h = p.kv_first * group + id % (p.kv_count * group);
  id /= p.kv_count * group;
  let b = p.batch_first + id % p.batch_count;
  let t0 = (p.query_tiles - 1u - id / p.batch_count) * BM;
  let kv_head = h / group;
#include "common.inc.wgsl" subgroup_index
  let t_last = min(t0 + BM, p.queries) - 1u;
  let first_tile = first_seen(doc_start[b * p.queries + t0], t0) / BN;
  let tiles = t_last / BN + 1u - first_tile;
  let ld_ds = 2u * DS_LD;
  let ld_k = 2u * K_LD;
  let ld_s = S_LD;
  let first_block = subgroup / 2u * ROW_BLOCKS;
  let first_column = subgroup % 2u * COLUMN_BLOCKS;
#unroll r ROW_BLOCKS
#unroll c COLUMN_BLOCKS
  var acc_$r_$c = coop_mat16x16<f32, C>();
#end
#end

  // Of ds an invocation reads the same queries of all tiles.
#unroll n LOADS_DS
  let ds_at_$n = (lid + $nu * THREADS) % (BN * M8);
  let block_$n = t0 / 16u + ds_at_$n / (2u * BN);
  let ds_key_$n = ds_at_$n / 2u % BN;
  let tile_query_$n = min(block_$n * 16u / COLUMNS * COLUMNS, p.queries - 1u);
  let tile_low_$n = first_seen(doc_start[b * p.queries + tile_query_$n], tile_query_$n);
#include "attention_matrix.inc.wgsl" stored_at block=block_$n to=stored_$n
  let ds_to_$n = ds_key_$n * DS_LD + ds_at_$n / (2u * BN) * 2u + ds_at_$n % 2u;
#end
#unroll a AHEAD
#unroll n LOADS_DS
  var ds_ahead_$a_$n: vec4<u32>;
#end
#unroll n LOADS_K
  var k_ahead_$a_$n: vec4<u32>;
#end
  {
    let number = $au;
#include fetch_tile
#include keep_tile
  }
#end
  // The last round comes after the loop: if loads were used only in the next iteration, NVIDIA's compiler would move them
  // there (bench/notes/rejected-tensor-cores.md).
  let rounds = (tiles + AHEAD - 1u) / AHEAD;
  for (var n = 1u; n < rounds; n++) {
#unroll a AHEAD
    {
      let staged = (n - 1u) * AHEAD + $au;
#include stage_tile
      workgroupBarrier();
      let number = n * AHEAD + $au;
#include fetch_tile
#include multiply_tile
      workgroupBarrier();
#include keep_tile
    }
#end
  }
#unroll a AHEAD
  {
    let staged = (rounds - 1u) * AHEAD + $au;
#include stage_tile
    workgroupBarrier();
#include multiply_tile
    workgroupBarrier();
  }
#end

  let strip_at = subgroup * (16u * S_LD);
#unroll r ROW_BLOCKS
#unroll c COLUMN_BLOCKS
  workgroupBarrier();
  coopStoreT(acc_$r_$c, &strips[strip_at], ld_s);
  workgroupBarrier();
#unroll i VECTORS
  {
    let at = lid % $LANESu + $iu * $LANESu;
    let t = t0 + 16u * (first_block + $ru) + at / 4u;
    if (t < p.queries && !extra) {
      dq[((b * p.queries + t) * p.heads + h) * W4 + 4u * (first_column + $cu) + at % 4u] =
        DQ_T(strips[strip_at + at / 4u * S_LD + at % 4u] * p.scale);
    }
  }
#end
#end
#end
}

#part fetch_tile
// Load ds and k of tile `number` into registers. From `tiles` on, the last one is repeated.
    let j0 = (first_tile + min(number, tiles - 1u)) * BN;
#unroll n LOADS_DS
    let ds_next_$n = ds[(stored_$n + j0 + ds_key_$n) * 2u + ds_at_$n % 2u];
#end
#unroll n LOADS_K
    let k_at_$n = (lid + $nu * THREADS) % (BN * W8);
    let k_next_$n = k[((b * p.queries + min(j0 + k_at_$n / W8, p.queries - 1u)) * p.kv_heads + kv_head) * W8 + k_at_$n % W8];
#end
#endpart

#part keep_tile
// Keep what the part fetch_tile has loaded in the registers of set $a.
#unroll n LOADS_DS
    ds_ahead_$a_$n = ds_next_$n;
#end
#unroll n LOADS_K
    k_ahead_$a_$n = k_next_$n;
#end
#endpart

#part stage_tile
// Store tile `staged`, in the registers of set $a, to workgroup memory; ds of a tile from `tiles` on as zeros.
#unroll n LOADS_DS
    // The tile of keys and queries, as the kernel that wrote ds had it, if it had it.
    let key_tile_$n = ((first_tile + staged) * BN + ds_key_$n) / KEYS * KEYS;
    let has_$n = block_$n * 16u / COLUMNS * COLUMNS >= key_tile_$n && tile_low_$n < key_tile_$n + KEYS && staged < tiles;
    let words_$n = select(vec4<u32>(), ds_ahead_$a_$n, has_$n);
    ds_tile[ds_to_$n] = Eight(four_of(words_$n.xy), four_of(words_$n.zw));
#end
#unroll n LOADS_K
    let k_place_$n = (lid + $nu * THREADS) % (BN * W8);
    let k_to_$n = k_place_$n / W8 * K_LD + k_place_$n % W8;
    k_tile[k_to_$n] = Eight(four_of(k_ahead_$a_$n.xy), four_of(k_ahead_$a_$n.zw));
#end
#endpart

#part multiply_tile
// Add the product of the tile in workgroup memory to the sums.
#unroll j NF
    {
#unroll r ROW_BLOCKS
      let left_at_$r = 16u * $ju * DS_LD + 2u * (first_block + $ru);
      let left_$r = coopLoad<coop_mat16x16<f16, A>>(&ds_tile[left_at_$r].low, ld_ds);
#end
#unroll c COLUMN_BLOCKS
      {
        let right_at_$c = 16u * $ju * K_LD + 2u * (first_column + $cu);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&k_tile[right_at_$c].low, ld_k);
#unroll r ROW_BLOCKS
        acc_$r_$c = coopMultiplyAdd(left_$r, right, acc_$r_$c);
#end
      }
#end
    }
#end
#endpart
