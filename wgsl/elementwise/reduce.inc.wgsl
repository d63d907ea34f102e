// Parts of the reductions.

#part columns of
// Part of sums over rows: the sum of $of(row, c), a C_T, over first <= row < last, in a fixed order. WIDE neighboring
// invocations have a column each (c, clamped to the last one), and 256 / WIDE of them share its rows. Invocations 0 to
// WIDE - 1 get the sums. All 256 must call it.
const TALL = 256u / WIDE;
var<workgroup> sums: array<C_T, 256>;

fn column_sum(first: u32, last: u32, c: u32, lid: u32) -> C_T {
  var sum0 = C_T(0.0); var sum1 = C_T(0.0); var sum2 = C_T(0.0); var sum3 = C_T(0.0);
  for (var row = first + lid / WIDE; row < last; row += 4u * TALL) {
#unroll i 4
    let x$i = $of(min(row + $i * TALL, last - 1u), c);
#end
#unroll i 4
    sum$i += select(C_T(0.0), x$i, row + $i * TALL < last);
#end
  }
  sums[lid] = (sum0 + sum1) + (sum2 + sum3);
  workgroupBarrier();
  for (var width = TALL / 2u; width > 0u; width /= 2u) {
    if (lid / WIDE < width) { sums[lid] += sums[lid + width * WIDE]; }
    workgroupBarrier();
  }
  return sums[lid];
}
#endpart

#part workgroup name type tile both
// Part of others: reduce a value of each of 256 invocations, in a fixed order, and return the result to all. $both
// combines `mine` and `other`. A barrier is needed before $tile is used again.
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
#endpart
