// Parts of the norms.

#part row_sum
// Part of the norms: LANES invocations of 256 share a row.
const FOLD = select(4u, 16u, LANES >= 64u);  // partial sums that every invocation adds
var<workgroup> partial: array<f32, 256>;
var<workgroup> folded: array<f32, 256>;

fn product(a: C_T, b: C_T) -> f32 {
#if VEC == 4
  return dot(a, b);
#else
  return a * b;
#endif
}

// Sum over the invocations of one row, in a fixed order, returned to all of them. It may be called again without a
// barrier: `partial` is next written after the second barrier, `folded` after the next call's first.
fn row_sum(value: f32, lid: u32) -> f32 {
  let lane = lid % LANES;
  let start = lid - lane;
  partial[lid] = value;
  workgroupBarrier();
  if (lane < FOLD) {
    var sum = 0.0;
    for (var j = lane; j < LANES; j += FOLD) { sum += partial[start + j]; }
    folded[start + lane] = sum;
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var j = 0u; j < FOLD; j++) { sum += folded[start + j]; }
  return sum;
}
#endpart
