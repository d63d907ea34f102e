// Part of attention's kernels that own keys: which part, of which key/value head's group and of the tiles of queries, and which
// BM keys are those of workgroup `id`; end_query: no query from there on sees them by the window.
  let split = id % parts;
  id /= parts;
  let kv_head = id % p.kv_heads;
  id /= p.kv_heads;
  let b = id % p.batch;
  let j0 = (id / p.batch) * BM;
  let j_last = min(j0 + BM, p.queries) - 1u;
  let query_split = split % p.query_splits;
  let group = p.heads / p.kv_heads / p.head_splits;  // heads of this part
  let first_head = kv_head * (p.heads / p.kv_heads) + split / p.query_splits * group;
  var end_query = p.queries;
  if (p.window > 0u) { end_query = min(end_query, j_last + p.window); }
