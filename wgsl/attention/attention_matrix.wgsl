// attention.wgsl on tensor cores: o and lse, with f16 q, k, v and f32 sums. Heads have WIDTH elements, a multiple of
// 32.
//
// Operands, masks and dispatch are those of attention.wgsl. A workgroup of SG subgroups of LANES invocations owns BM =
// 16 SG queries of one head and walks tiles of BN keys. A subgroup has 16 rows; with 8 lanes two subgroups share them,
// and with BLOCKS = 2 two subgroups share 32.
//
// K and V of a tile are next to each other in workgroup memory. K of the next tile is loaded together with V of this
// one, and both are stored after the scores. IN_TURNS they share one place: V is stored after the scores, and the next
// K after the sums. That leaves room for more workgroups on a compute unit. A cooperative matrix cannot be indexed, so
// the scores pass through workgroup memory (strips), where ROW_LANES invocations share a row, and come back as f16
// (p_tile).
//
// The offset `top` of a row's exponents follows the row maximum only when that has grown by more than GROWTH (in powers
// of two: p stays below 2^GROWTH, inside f16). So the sums in `acc`, which can be scaled only through workgroup memory,
// are rarely rescaled. Tiles are walked from the last to the first, because a row's largest score is often that of its
// own key. Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 1, with base-2 exponents.
// Needs subgroups of LANES, in which neighbors share a row.
enable f16;
enable wgpu_cooperative_matrix;

#include "attention.inc.wgsl" forward
#include "common.inc.wgsl" eight

const THREADS: u32 = $SG_LANESu * SG;
const GROWTH: f32 = 15.0;
#include "attention_matrix.inc.wgsl" tiles

var<workgroup> p_tile: array<vec4<f16>, BM * S_LD - 2u>;
var<workgroup> grown: array<u32, 8>;  // by subgroup; the rest 0

@compute @workgroup_size(THREADS)
fn main(
#include "attention_matrix.inc.wgsl" builtins
) {
#include "attention_matrix.inc.wgsl" rows

  // The keys that this row sees, and the range of all rows. Both bounds rise with t.
  let before = u32(cache_len[0]);
  let position = before + t;
  let low = first_seen(doc_start[b * p.queries + t], position);
  let first_key = first_seen(doc_start[b * p.queries + t0], before + t0);
  let last_low = first_seen(doc_start[b * p.queries + t_last], before + t_last);
  let high = min(position, p.keys - 1u);
  let end_key = min(before + t_last + 1u, p.keys);
  let first_tile = first_key / BN + split;
  let tiles = (max((end_key + BN - 1u) / BN, first_tile) - first_tile + p.splits - 1u) / p.splits;
  let last_tile = max(tiles, 1u) - 1u;  // of those of the split

  if (lid < 8u) { grown[lid] = 0u; }  // workgroup memory is not cleared: leftovers would make every tile rescale
  var top = FLOOR;
  var row_sum = 0.0;
#include "attention_matrix.inc.wgsl" load loads=LOADS_COLUMNS x=k first=(first_tile+last_tile*p.splits)*BN end=end_key tokens=keys heads=kv_heads head=kv_head place=0u

  workgroupBarrier();
  for (var n = 0u; n < tiles; n++) {
    let j0 = (first_tile + (last_tile - n) * p.splits) * BN;
    let next_j0 = (first_tile + (last_tile - min(n + 1u, last_tile)) * p.splits) * BN;
    // Keys from end_key on are not read: a cache may hold NaN beyond its last token, and 0 times NaN is not 0.
#unroll n LOADS_COLUMNS
    let at_$n = (lid + $nu * THREADS) % (BN * W8);
    let v_j_$n = min(j0 + at_$n / W8, end_key - 1u);
    let k_j_$n = min(next_j0 + at_$n / W8, end_key - 1u);
    let v_next_$n = v[((b * p.keys + v_j_$n) * p.kv_heads + kv_head) * W8 + at_$n % W8];
    let k_next_$n = k[((b * p.keys + k_j_$n) * p.kv_heads + kv_head) * W8 + at_$n % W8];
#end
#include "attention_matrix.inc.wgsl" score name=s x=q row=side*(16u*$NF_OWNu)
#include "attention_matrix.inc.wgsl" keep_score name=s
#if OWN_STRIPS
    subgroupBarrier();
#else
    workgroupBarrier();
#include stage_tile
#endif

    // An invocation has every ROW_LANES-th vec4 of its row.
    var m = MASKED;
#unroll i PAIRS
    var x_$i = strips[mine + $ROW_LANESu * $iu] * to_base2;
#end
    if (j0 + BN > before + t0 + 1u || j0 + BN > p.keys || j0 < last_low) {
#unroll i PAIRS
      {
        let key = vec4<u32>(j0 + 4u * ($ROW_LANESu * $iu + half)) + vec4<u32>(0u, 1u, 2u, 3u);
        x_$i = select(vec4<f32>(MASKED), x_$i, (key >= vec4<u32>(low)) & (key <= vec4<u32>(high)));
      }
#end
    }
#unroll i PAIRS
    m = max(m, max(max(x_$i.x, x_$i.y), max(x_$i.z, x_$i.w)));
#end
#if ROW_LANES != 1
    m = max(m, subgroupShuffleXor(m, 1u));
#endif
#if ROW_LANES == 4
    m = max(m, subgroupShuffleXor(m, 2u));
#endif
    let grows = m > top + GROWTH;
    let shrink = select(1.0, exp2(top - m), grows);
    let again = subgroupAny(grows && row_sum > 0.0);
    if (lid % $LANESu == 0u) { grown[subgroup] = u32(again); }
    top = select(top, m, grows);
    var total = vec4<f32>();
#unroll i PAIRS
    {
      let e = exp2(x_$i - vec4<f32>(top));
      total += e;
      p_tile[row * S_LD + half + $ROW_LANESu * $iu] = vec4<f16>(e);
    }
#end
    row_sum = row_sum * shrink + (total.x + total.y + total.z + total.w);

    workgroupBarrier();
    let rescale = grown[0] | grown[1] | grown[2] | grown[3] | grown[4] | grown[5] | grown[6] | grown[7];
#if OWN_STRIPS
#include stage_tile
    workgroupBarrier();
#endif
    if (rescale != 0u) {
#unroll g OUT_PARTS
#unroll r BLOCKS
#unroll j NF_OWN
      coopStoreT(acc_$r_$g_$j, &strips[s_at_$r_$j], ld_s);
#end
#end
      workgroupBarrier();
#unroll i PAIRS
      strips[mine + $ROW_LANESu * $iu] *= shrink;
#end
      workgroupBarrier();
#unroll r BLOCKS
#unroll j NF_OWN
      acc_$r_$g_$j = coopLoadT<coop_mat16x16<f32, C>>(&strips[s_at_$r_$j], ld_s);
#end
#end
      workgroupBarrier();
#end
    }
#if IN_TURNS
#include "attention_matrix.inc.wgsl" sums left=p_tile place=0u
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" stage x=k place=0u
    workgroupBarrier();
#else
#include "attention_matrix.inc.wgsl" sums left=p_tile place=BN
#endif
  }

#if ROW_LANES == 1
  let total = row_sum;
#else
#if ROW_LANES == 4
  row_sum += subgroupShuffleXor(row_sum, 2u);
#endif
  let total = row_sum + subgroupShuffleXor(row_sum, 1u);
#endif
  let inverse = select(0.0, 1.0 / total, total > 0.0);
#include "attention_matrix.inc.wgsl" store y=o type=O_T factor=inverse
  if (stores && half == 0u) {
    lse[((split * p.batch + b) * p.heads + h) * p.queries + t] = LN2 * (top + log2(max(total, 1e-30)));
  }
}

#part stage_tile
// Store the next K and this V, or in turns this V, which were loaded into registers.
#if IN_TURNS
#include "attention_matrix.inc.wgsl" stage x=v place=0u
#else
#include "attention_matrix.inc.wgsl" stage x=k place=0u
#include "attention_matrix.inc.wgsl" stage x=v place=BN
#endif
#endpart
