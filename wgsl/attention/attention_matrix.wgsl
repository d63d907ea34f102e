// o and lse of attention.wgsl on matrix units: f16 q, k, v; f32 sums. Heads of WIDTH elements, a multiple of 32.
//
// Operands, masks and dispatch are those of attention.wgsl. A workgroup of SG subgroups of LANES invocations owns BM = 16 SG
// queries of one head, 16 a subgroup (or two of 8 lanes; or 32 two subgroups), and walks tiles of BN keys. K and V of a tile lie side by side in workgroup memory;
// K of the next tile is read as V of this one is, and both are stored once the scores stand; or IN_TURNS in one place, V then and K
// once the sums stand, which leaves room for more workgroups on a compute unit. What a cooperative matrix holds
// cannot be indexed, so the scores pass through workgroup memory (strips), where ROW_LANES invocations share a row of 16, and
// come back as f16 (p_tile).
//
// The exponent's offset `top` of a row follows its maximum only where that has grown by more than GROWTH (in powers of
// two; p stays below 2^GROWTH, far inside of f16), so that the sums in `acc`, which can be scaled only through workgroup
// memory, rarely have to be. Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 1; the exponent in base 2.
// Wants: subgroups of LANES, of which neighbours share a row.
enable f16;
enable wgpu_cooperative_matrix;

#include "attention.inc.wgsl" forward
#include "common.inc.wgsl" eight

const THREADS: u32 = $SG_LANESu * SG;
const GROWTH: f32 = 8.0;
#include "attention_matrix.inc.wgsl" tiles

var<workgroup> p_tile: array<vec4<f16>, BM * S_LD - 2u>;
var<workgroup> grown: array<u32, 8>;  // by subgroup; the rest 0

@compute @workgroup_size(THREADS)
fn main(
#include "attention_matrix.inc.wgsl" builtins
) {
#include "attention_matrix.inc.wgsl" rows

  // What this row sees, and the range that all see. Both bounds rise with t.
  let before = u32(cache_len[0]);
  let position = before + t;
  let low = first_seen(doc_start[b * p.queries + t], position);
  let first_key = first_seen(doc_start[b * p.queries + t0], before + t0);
  let last_low = first_seen(doc_start[b * p.queries + t_last], before + t_last);
  let high = min(position, p.keys - 1u);
  let end_key = min(before + t_last + 1u, p.keys);
  let first_tile = first_key / BN + split;
  let tiles = (max((end_key + BN - 1u) / BN, first_tile) - first_tile + p.splits - 1u) / p.splits;

  if (lid < 8u) { grown[lid] = 0u; }  // wgpu-native does not: what another kernel left there made every tile rescale
  var top = FLOOR;
  var row_sum = 0.0;
#include "attention_matrix.inc.wgsl" load loads=LOADS_COLUMNS x=k first=first_tile*BN end=end_key tokens=keys heads=kv_heads head=kv_head place=0u

  workgroupBarrier();
  for (var n = 0u; n < tiles; n++) {
    let j0 = (first_tile + n * p.splits) * BN;
    // Keys from end_key on are not read: beyond a cache's last token there may be anything, and 0 times NaN is not 0.
#unroll n LOADS_COLUMNS
    let at_$n = (lid + $nu * THREADS) % (BN * W8);
    let v_j_$n = min(j0 + at_$n / W8, end_key - 1u);
    let k_j_$n = min(j0 + p.splits * BN + at_$n / W8, end_key - 1u);
    let v_next_$n = v[((b * p.keys + v_j_$n) * p.kv_heads + kv_head) * W8 + at_$n % W8];
    let k_next_$n = k[((b * p.keys + k_j_$n) * p.kv_heads + kv_head) * W8 + at_$n % W8];
#end
#include "attention_matrix.inc.wgsl" score name=s x=q row=side*(16u*$NF_OWNu)
#include "attention_matrix.inc.wgsl" keep_score name=s
    workgroupBarrier();
#if IN_TURNS
#include "attention_matrix.inc.wgsl" stage x=v place=0u
#else
#include "attention_matrix.inc.wgsl" stage x=k place=0u
#include "attention_matrix.inc.wgsl" stage x=v place=BN
#endif

    // Of its row an invocation has every ROW_LANES-th vec4.
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

    let rescale = workgroupUniformLoad(&grown);
    if ((rescale[0] | rescale[1] | rescale[2] | rescale[3] | rescale[4] | rescale[5] | rescale[6] | rescale[7]) != 0u) {
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
