// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: which queries of which head the workgroup owns, and which of the
// splits of their keys; of a subgroup's 16 rows each belongs to two invocations. A workgroup beyond the last does the last
// again, without storing: cooperative operations want uniform control flow.
  var id = wg.x + wg.y * nwg.x;
  let last_id = p.splits * p.heads * p.batch * p.query_tiles - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
  let split = id % p.splits;
  id /= p.splits;
  let h = id % p.heads;
  id /= p.heads;
  let b = id % p.batch;
  let t0 = (p.query_tiles - 1u - id / p.batch) * BM;
  let kv_head = h / (p.heads / p.kv_heads);
  let subgroup = lid / 32u;
  let half = lid % 2u;
  let row = lid / 2u;
  let t = min(t0 + row, p.queries - 1u);
  let t_last = min(t0 + BM, p.queries) - 1u;
