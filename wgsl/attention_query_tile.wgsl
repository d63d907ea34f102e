// Part of attention.wgsl and attention_backward_dq.wgsl: which queries of which head the workgroup owns, and which of the
// splits of their keys.
  var id = wg.x + wg.y * nwg.x;
  if (id >= p.splits * p.heads * p.batch * p.query_tiles) { return; }
#include "attention_query_id.wgsl"
  let tx = lid % TX;
  let ty = lid / TX;
