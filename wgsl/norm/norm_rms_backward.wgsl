// Backward of RMSNorm (norm_rms.wgsl): with xn = x rstd and g = dy weight,
//   dx = rstd (g - xn mean(g xn)) [+ residual_grad];   dweight = sum over rows of dy xn.
//   dy, x, residual_grad, dx [rows, columns] f32 or f16 (DY_T, X_T, R_T, DX_T: vec4 where columns is a multiple of 4);
//   rounded [rows, columns] (ROUNDED_T): a copy of dx, rounded;
//   weight [columns] f32 (C_T); rstd [rows] f32; part [groups * 256 / LANES, columns] C_T: overwritten with sums of dy
//   xn over the rows that one place of a workgroup takes; reduce_rows.wgsl adds them in a fixed order.
// LANES invocations share a row. Each array is read once, except beyond LANES * PER elements of a row.
// Dispatch: `groups` workgroups; each takes every groups-th run of 256 / LANES rows.
struct Params { rows: u32, columns: u32, inverse_count: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DY_T>;
@group(0) @binding(2) var<storage, read> x: array<X_T>;
@group(0) @binding(3) var<storage, read> weight: array<C_T>;
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
#if RESIDUAL
@group(0) @binding(5) var<storage, read> residual_grad: array<R_T>;
#endif
@group(0) @binding(6) var<storage, read_write> dx: array<DX_T>;
#if DWEIGHT
@group(0) @binding(7) var<storage, read_write> part: array<C_T>;
#endif
#if ROUNDED
@group(0) @binding(8) var<storage, read_write> rounded: array<ROUNDED_T>;
#endif

const ROWS = 256u / LANES;
#include "norm.inc.wgsl" row_sum

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let first = (wg.x + wg.y * nwg.x) * ROWS;
  let place = first + lid / LANES;
  let step = nwg.x * nwg.y * ROWS;
  let lane = lid % LANES;
#unroll i PER
  let c$i = lane + $i * LANES;
#if DWEIGHT
  var dw$i = C_T(0.0);
#endif
#end
  // `start` does not depend on `lid`, so that every compiler sees that the loop is uniform: row_sum has barriers.
  // AT_ONCE rows are loaded before the first barrier, so that enough bytes are in flight if elements are small.
  for (var start = first; start < p.rows; start += AT_ONCE * step) {
#unroll q AT_ONCE
    let row$q = start + $qu * step + lid / LANES;
    let r$q = rstd[min(row$q, p.rows - 1u)];
    let base$q = min(row$q, p.rows - 1u) * p.columns;
#unroll i PER
    let dy$i_$q = C_T(dy[base$q + min(c$i, p.columns - 1u)]);
    let x$i_$q = C_T(x[base$q + min(c$i, p.columns - 1u)]);
#end
#end
#unroll q AT_ONCE
    var sum$q = 0.0;
#unroll i PER
    if (c$i < p.columns) { sum$q += product(dy$i_$q * weight[c$i], x$i_$q); }
#end
    for (var c = lane + PER * LANES; c < p.columns; c += LANES) {
      sum$q += product(C_T(dy[base$q + c]) * weight[c], C_T(x[base$q + c]));
    }
    let k$q = row_sum(sum$q, lid) * r$q * r$q * p.inverse_count;  // mean(g xn) * rstd
    if (row$q < p.rows) {
#unroll i PER
      if (c$i < p.columns) {
        var grad = r$q * (dy$i_$q * weight[c$i] - x$i_$q * k$q);
#if RESIDUAL
        grad += C_T(residual_grad[base$q + c$i]);
#endif
        dx[base$q + c$i] = DX_T(grad);
#if ROUNDED
        rounded[base$q + c$i] = ROUNDED_T(grad);
#endif
#if DWEIGHT
        dw$i += dy$i_$q * (x$i_$q * r$q);
#endif
      }
#end
      for (var c = lane + PER * LANES; c < p.columns; c += LANES) {
        let dyc = C_T(dy[base$q + c]);
        let xc = C_T(x[base$q + c]);
        var grad = r$q * (dyc * weight[c] - xc * k$q);
#if RESIDUAL
        grad += C_T(residual_grad[base$q + c]);
#endif
        dx[base$q + c] = DX_T(grad);
#if ROUNDED
        rounded[base$q + c] = ROUNDED_T(grad);
#endif
#if DWEIGHT
        // So long a row has a workgroup to itself, and there are no more workgroups than rows: the first row of a place
        // writes its sums, the others add.
        let before = select(part[place * p.columns + c], C_T(0.0), row$q == place);
        part[place * p.columns + c] = before + dyc * (xc * r$q);
#endif
      }
    }
#end
  }
#if DWEIGHT
#unroll i PER
  if (c$i < p.columns) { part[place * p.columns + c$i] = dw$i; }
#end
#endif
}
