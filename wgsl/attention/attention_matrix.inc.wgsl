// Parts of the attention kernels on tensor cores.

#part tiles
// Part of attention_matrix*.wgsl: workgroup memory. A subgroup has 16 of the BM rows.
const BM: u32 = 16u * SG;
const W8: u32 = WIDTH / 8u;
// Row lengths in eights and in vec4, padded so that neighboring rows start in different banks.
const TILE_LD: u32 = W8 + 1u;
const S_LD: u32 = BN / 4u + 2u;
const LEFT_W8: u32 = W8 / LEFT_PARTS;

// First the left operands pass through it; then it has BN rows of one array and BN of another (or both in turns).
var<workgroup> tile: array<Eight, TILE>;
// Elements of cooperative matrices, which invocations cannot index otherwise.
var<workgroup> strips: array<vec4<f32>, BM * S_LD - 2u>;
#endpart

#part builtins
// Part of attention_matrix*.wgsl: parameters of the entry point.
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
#if LANES != 32
  @builtin(subgroup_id) subgroup_id: u32,
#endif
#endpart

#part subgroup_rows
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: the first of a subgroup's BLOCKS x 16 rows. With two
// SIDES, two subgroups share them, and each has half of the columns (`side`).
#include "common.inc.wgsl" subgroup_index
#if SIDES == 2
  let first_row = subgroup / 2u * (16u * BLOCKS);
  let side = subgroup % 2u;
#else
  let first_row = subgroup * (16u * BLOCKS);
  let side = 0u;
#endif
#endpart

#part rows
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: the workgroup's queries, head and split of the keys; its
// queries as left operands, and their sums. ROW_LANES invocations share a row. A workgroup beyond the last repeats the
// last one without storing, because cooperative operations need uniform control flow.
  var id = p.first + wg.x + wg.y * nwg.x;
  let last_id = p.end - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
#include "attention.inc.wgsl" query_id
#include subgroup_rows
  let half = lid % $ROW_LANESu;
  let row = lid / $ROW_LANESu;
  let t = min(t0 + row, p.queries - 1u);
  let t_last = min(t0 + BM, p.queries) - 1u;
  let strip = first_row * S_LD + side * (4u * $NF_OWNu);
#unroll r BLOCKS
#unroll j NF_OWN
  let s_at_$r_$j = strip + 16u * $ru * S_LD + 4u * $ju;
#end
#end
  let mine = row * S_LD + half;
  let to_base2 = p.scale * LOG2E;
  let ld = 2u * TILE_LD;  // row stride for cooperative loads, in vec4<f16>
  let ld_left = 2u * (LEFT_W8 + 1u);
  let ld_s = S_LD;
#include left x=q first=t0 heads=heads head=h row=first_row blocks=BLOCKS
#unroll r BLOCKS
#unroll g OUT_PARTS
#unroll j NF_OWN
  var acc_$r_$g_$j = coop_mat16x16<f32, C>();
#end
#end
#end
#endpart

#part load loads x first end tokens heads head place
// Part of attention_matrix*.wgsl: copy rows of one head of $x, from $first on, into `tile` from row $place on. From
// $end on, the last row is repeated.
#unroll n $loads
  {
    let at = (lid + $nu * THREADS) % (BN * W8);
    let token = min($first + at / W8, $end - 1u);
    let words = $x[((b * p.$tokens + token) * p.$heads + $head) * W8 + at % W8];
    let to = ($place + at / W8) * TILE_LD + at % W8;
    tile[to] = Eight(four_of(words.xy), four_of(words.zw));
  }
#end
#endpart

#part left x first heads head row blocks
// Part of attention_matrix*.wgsl: load the workgroup's rows of one head of $x, from $first on, as left operands
// $x_<block>_<part>_<step>: $blocks x 16 rows per subgroup, from $row on. They pass through `tile`, one of LEFT_PARTS
// parts of their columns at a time.
#unroll part LEFT_PARTS
#unroll n LOADS_ROWS
  {
#if LANES == 32
    let at = lid + $nu * THREADS;
#else
    let at = (lid + $nu * THREADS) % (BM * LEFT_W8);  // some may be read twice
#endif
    let token = min($first + at / LEFT_W8, p.queries - 1u);
    let words = $x[((b * p.queries + token) * p.$heads + $head) * W8 + LEFT_W8 * $partu + at % LEFT_W8];
    let to = at / LEFT_W8 * (LEFT_W8 + 1u) + at % LEFT_W8;
    tile[to] = Eight(four_of(words.xy), four_of(words.zw));
  }
#end
  workgroupBarrier();
#unroll r $blocks
#unroll c LEFT_DF
  let $x_at_$r_$part_$c = ($row + 16u * $ru) * (LEFT_W8 + 1u) + 2u * $cu;
  let $x_$r_$part_$c = coopLoadT<coop_mat16x16<f16, A>>(&tile[$x_at_$r_$part_$c].low, ld_left);
#end
#end
  workgroupBarrier();
#end
#endpart

#part fetch x y first heads head
// Part of attention_matrix_dq.wgsl and attention_matrix_dkv.wgsl: load BN rows of one head of $x and $y, from $first
// on, into registers. Beyond the end, the last row is repeated.
#unroll n LOADS_COLUMNS
    let at_$n = (lid + $nu * THREADS) % (BN * W8);
    let source_$n = ((b * p.queries + min($first + at_$n / W8, p.queries - 1u)) * p.$heads + $head) * W8 + at_$n % W8;
    let $x_next_$n = $x[source_$n];
    let $y_next_$n = $y[source_$n];
#end
#endpart

#part stage x place
// Part of attention_matrix*.wgsl: store the rows of $x that were loaded into registers into `tile`, from row $place on.
#unroll n LOADS_COLUMNS
    let $x_to_$n = ($place + at_$n / W8) * TILE_LD + at_$n % W8;
    tile[$x_to_$n] = Eight(four_of($x_next_$n.xy), four_of($x_next_$n.zw));
#end
#endpart

#part score name x row
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: $name_<block>_<column> = the left operand $x times rows
// of `tile` from $row on.
#unroll r BLOCKS
#unroll j NF_OWN
    var $name_$r_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll part LEFT_PARTS
#unroll c LEFT_DF
#unroll j NF_OWN
    {
      let right_at_$j = ($row + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let right = coopLoad<coop_mat16x16<f16, B>>(&tile[right_at_$j].low, ld);
#unroll r BLOCKS
      $name_$r_$j = coopMultiplyAdd($x_$r_$part_$c, right, $name_$r_$j);
#end
    }
#end
#end
#end
#endpart

#part keep_score name
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: store $name into the strips.
#unroll r BLOCKS
#unroll j NF_OWN
    coopStoreT($name_$r_$j, &strips[s_at_$r_$j], ld_s);
#end
#end
#endpart

#part sums left place
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: acc += $left (BLOCKS x 16 rows per subgroup) times BN
// rows of `tile` from row $place on.
#unroll j NF
    {
#unroll r BLOCKS
      let left_at_$r = (first_row + 16u * $ru) * S_LD + 4u * $ju;
      let left_$r = coopLoadT<coop_mat16x16<f16, A>>(&$left[left_at_$r], ld_s);
#end
#unroll g OUT_PARTS
#unroll c NF_OWN
      {
        let right_at_$c = ($place + 16u * $ju) * TILE_LD + 2u * ($gu * NF + side * $NF_OWNu + $cu);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&tile[right_at_$c].low, ld);
#unroll r BLOCKS
        acc_$r_$g_$c = coopMultiplyAdd(left_$r, right, acc_$r_$g_$c);
#end
      }
#end
#end
    }
#end
#endpart

#part store y type factor
// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: store acc times $factor to the workgroup's rows of $y,
// through the strips.
  let stores = t0 + row < p.queries && !extra;
  let out = (((split * p.batch + b) * p.queries + t) * p.heads + h) * W4;
#unroll g OUT_PARTS
  workgroupBarrier();
#unroll r BLOCKS
#unroll j NF_OWN
  coopStoreT(acc_$r_$g_$j, &strips[s_at_$r_$j], ld_s);
#end
#end
  workgroupBarrier();
#unroll i PAIRS
  if (stores) { $y[out + 4u * NF * $gu + $ROW_LANESu * $iu + half] = $type(strips[mine + $ROW_LANESu * $iu] * $factor); }
#end
#end
#endpart

#part stored_at block to
// Part of attention_matrix_dkv.wgsl and attention_matrix_dq_stored.wgsl: where ds of 16 queries of a head of this launch
// begins, in rows of 16 elements. They have a row for each key up to the end of their tile of KEYS.
  let $to_tile = $block / (KEYS / 16u);
  let $to_head = (b - p.batch_first) * (p.kv_count * (p.heads / p.kv_heads)) + h - p.kv_first * (p.heads / p.kv_heads);
  let $to = KEYS * ($to_head * (KEYS / 16u * (p.key_tiles * (p.key_tiles + 1u) / 2u)) +
    KEYS / 16u * ($to_tile * ($to_tile + 1u) / 2u) + $block % (KEYS / 16u) * ($to_tile + 1u));
#endpart
