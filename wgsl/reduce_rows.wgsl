// out[chunk, c] = sum over the chunk's rows of x[r, c] (+ out when ACCUMULATE). Run twice for tall arrays: into chunks,
// then over the chunks; the order of addition is fixed.
//   x [rows, columns] X_T (f32 or f16, vec4 of them where columns divide by 4: columns counts elements of X_T);
//   out [chunks, columns] C_T (f32 or vec4<f32>).
// A workgroup is WIDE columns by 256 / WIDE rows. Dispatch: (ceil(columns / WIDE), chunks).
struct Params { rows: u32, columns: u32, rows_per_chunk: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read_write> out: array<C_T>;

const TALL = 256u / WIDE;
var<workgroup> sums: array<C_T, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let column = wg.x * WIDE + lid % WIDE;
  let c = min(column, p.columns - 1u);
  let last = min((wg.y + 1u) * p.rows_per_chunk, p.rows);
  var sum0 = C_T(0.0); var sum1 = C_T(0.0); var sum2 = C_T(0.0); var sum3 = C_T(0.0);
  for (var row = wg.y * p.rows_per_chunk + lid / WIDE; row < last; row += 4u * TALL) {
#unroll i 4
    let x$i = C_T(x[min(row + $i * TALL, last - 1u) * p.columns + c]);
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
  if (lid < WIDE && column < p.columns) {
    let at = wg.y * p.columns + column;
#if ACCUMULATE
    out[at] += sums[lid];
#else
    out[at] = sums[lid];
#endif
  }
}
