// Part of attention's kernels that own queries: which of the splits of their keys, which head, and the first of BM queries are
// those of workgroup `id`.
  let split = id % p.splits;
  id /= p.splits;
  let h = id % p.heads;
  id /= p.heads;
  let b = id % p.batch;
  let t0 = (p.query_tiles - 1u - id / p.batch) * BM;
  let kv_head = h / (p.heads / p.kv_heads);
