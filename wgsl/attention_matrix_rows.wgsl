// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: which queries of which head the workgroup owns, and which of the
// splits of their keys; of 16 rows of a subgroup each belongs to two invocations. A workgroup beyond the last does the last
// again, without storing: cooperative operations want uniform control flow. Its queries as left operands, and sums for them.
  var id = wg.x + wg.y * nwg.x;
  let last_id = p.splits * p.heads * p.batch * p.query_tiles - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
#include "attention_query_id.wgsl"
  let subgroup = lid / 32u;
  let half = lid % 2u;
#unroll r RF
  let row_$r = (subgroup * RF + $ru) * 16u + lid % 32u / 2u;
  let t_$r = min(t0 + row_$r, p.queries - 1u);
  let mine_$r = row_$r * S_LD + half;
#end
  let t_last = min(t0 + BM, p.queries) - 1u;
  let strip = subgroup * 16u * RF * S_LD;
  let to_base2 = p.scale * LOG2E;
  let ld = 2u * TILE_LD;  // as cooperative matrices take it: in vec4<f16>
  let ld_left = 2u * (LEFT_W8 + 1u);
  let ld_s = S_LD;
#include "attention_matrix_left.wgsl" x=q first=t0 heads=heads head=h row=subgroup*16u*RF
#unroll r RF
#unroll g OUT_PARTS
#unroll j NF
  var acc_$r_$g_$j = coop_mat16x16<f32, C>();
#end
#end
#end
