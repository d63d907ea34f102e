// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: which queries of which head the workgroup owns, and which of the
// splits of their keys; of a subgroup's 16 rows each belongs to two invocations. A workgroup beyond the last does the last
// again, without storing: cooperative operations want uniform control flow. Its queries as left operands, and sums for them.
  var id = wg.x + wg.y * nwg.x;
  let last_id = p.splits * p.heads * p.batch * p.query_tiles - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
#include "attention_query_id.wgsl"
  let subgroup = lid / 32u;
  let half = lid % 2u;
  let row = lid / 2u;
  let t = min(t0 + row, p.queries - 1u);
  let t_last = min(t0 + BM, p.queries) - 1u;
  let strip = subgroup * 16u * S_LD;
  let mine = row * S_LD + half;
  let to_base2 = p.scale * LOG2E;
  let ld = 2u * TILE_LD;  // as cooperative matrices take it: in vec4<f16>
  let ld_left = 2u * (LEFT_W8 + 1u);
  let ld_s = S_LD;
#include "attention_matrix_left.wgsl" x=q first=t0 heads=heads head=h row=subgroup*16u
#unroll g OUT_PARTS
#unroll j NF
  var acc_$g_$j = coop_mat16x16<f32, C>();
#end
#end
