// out [K, M] f32 = a [M, K] (row stride lda, first column a_col; f32 or f16 by A_KIND), transposed. GEMMs of many
// columns do this with A first, because k-major data is stored to workgroup memory by fewer, wider writes (gemm.py).
//
// Dispatch: x = tiles of 32 columns, y = tiles of 32 rows. A warp reads and writes whole lines; rows of the tile are
// padded by one, so that a column is in different banks.
struct Params { m: u32, k: u32, lda: u32, a_col: u32 }
@group(0) @binding(0) var<uniform> p: Params;
#include "common.inc.wgsl" dense x=a binding=1 kind=A_KIND vec=VEC_A
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

const SIDE: u32 = 32u;
const ROWS: u32 = 8u;  // rows of a tile that the workgroup reads at once
var<workgroup> tile: array<array<f32, SIDE + 1u>, SIDE>;

@compute @workgroup_size(SIDE * ROWS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let x = lid % SIDE;
  let col = min(wg.x * SIDE + x, p.k - 1u);
#unroll i 4
  let y_$i = lid / SIDE + $iu * ROWS;
  tile[y_$i][x] = read_a(min(wg.y * SIDE + y_$i, p.m - 1u) * p.lda + p.a_col + col);
#end
  workgroupBarrier();
  let row = wg.y * SIDE + x;
#unroll i 4
  if (row < p.m && wg.x * SIDE + y_$i < p.k) { out[(wg.x * SIDE + y_$i) * p.m + row] = tile[x][y_$i]; }
#end
}
