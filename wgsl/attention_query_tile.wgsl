// Part of attention.wgsl and attention_backward_dq.wgsl: which queries of which head the workgroup owns, and which of the
// splits of their keys.
  var id = wg.x + wg.y * nwg.x;
  if (id >= p.splits * p.heads * p.batch * p.query_tiles) { return; }
  let split = id % p.splits;
  id /= p.splits;
  let h = id % p.heads;
  id /= p.heads;
  let b = id % p.batch;
  let t0 = (p.query_tiles - 1u - id / p.batch) * BM;
  let kv_head = h / (p.heads / p.kv_heads);
  let tx = lid % TX;
  let ty = lid / TX;
