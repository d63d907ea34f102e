// Part of others: a value of each of 256 invocations made into one, given to all, in a fixed order. $both: of `mine` and
// `other`. Before $tile is used again there must be a barrier.
fn $name(value: $type, lid: u32) -> $type {
  $tile[lid] = value;
  workgroupBarrier();
  for (var width = 128u; width > 0u; width /= 2u) {
    if (lid < width) {
      let mine = $tile[lid];
      let other = $tile[lid + width];
      $tile[lid] = $both;
    }
    workgroupBarrier();
  }
  return $tile[0];
}
