// out[chunk, c] = sum over the chunk's rows of x[r, c] (+ out when ACCUMULATE). Tall arrays take two launches: into
// chunks, then over the chunks. The order of addition is fixed.
//   x [rows, columns] X_T (f32 or f16, or vec4 of it where columns is a multiple of 4; columns counts elements of X_T);
//   out [chunks, columns] C_T (f32 or vec4<f32>).
// A workgroup is WIDE columns by 256 / WIDE rows. Dispatch: (ceil(columns / WIDE), chunks).
struct Params { rows: u32, columns: u32, rows_per_chunk: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read_write> out: array<C_T>;

fn element(row: u32, c: u32) -> C_T { return C_T(x[row * p.columns + c]); }
#include "reduce.inc.wgsl" columns of=element

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let column = wg.x * WIDE + lid % WIDE;
  let first = wg.y * p.rows_per_chunk;
  let sum = column_sum(first, min(first + p.rows_per_chunk, p.rows), min(column, p.columns - 1u), lid);
  if (lid < WIDE && column < p.columns) {
    let at = wg.y * p.columns + column;
#if ACCUMULATE
    out[at] += sum;
#else
    out[at] = sum;
#endif
  }
}
