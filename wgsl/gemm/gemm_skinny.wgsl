// GEMM with a side of a LoRA's rank, in one launch and without tensor cores: X [rows, columns] f32 or f16 (X_KIND), S
// f32 of that rank, f32 sums and result. It computes the same as gemm_matrix_skinny.wgsl:
//
//   ALONG_ROWS false: C[rows, rank] = alpha * X S,    the reduction along X's columns  (x A^T, dy B)
//   ALONG_ROWS true:  C[rank, columns] = alpha * S X, the reduction along X's rows     (du^T x, dy^T u; + C where
//   ACCUMULATE)
//
// S is read as [reduction, rank] (RANK_INNER) or [rank, reduction]; C is written transposed where C_TRANS.
// gemm.wgsl would split K, which needs a second launch and memory for the parts. Here the invocations of a workgroup
// share the reduction, DEPTH at a time, and their sums are added in workgroup memory, in a fixed order.
//
// Dispatch: ALONG_ROWS false: rows / 16 workgroups, y = parts; true: columns / 16. An invocation owns 4 x 4 results and
// one of SLICES shares of each DEPTH. Needs: columns of X a multiple of 4.
//
// PARTS: X's columns are those of the weights of a stack; the second begins at column_1, the third at column_2. X S is
// computed for each part, whose ranks follow each other in C [rows, ld_c]. S X takes the part's ranks of S [reduction,
// ld_s]. first_rank: the first rank of a part that this launch computes.
#include "gemm_skinny.inc.wgsl" parameters
#include "common.inc.wgsl" dense x=x binding=1 kind=X_KIND vec=VEC_X
@group(0) @binding(2) var<storage, read> s: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

const BLOCKS: u32 = 4u * RANK4;  // of 4 x 4 results: 16 along X, RANK4 blocks along the rank
const THREADS: u32 = BLOCKS * SLICES;
// If the reduction runs along X's columns, tiles have rows of DEPTH, padded so that they start in different banks.
#if ALONG_ROWS
const LD_X: u32 = 4u;
const LD_S: u32 = RANK4;
const X_SIZE: u32 = DEPTH * LD_X;
const S_SIZE: u32 = DEPTH * LD_S;
#else
const LD_X: u32 = DEPTH / 4u + 1u;
const LD_S: u32 = LD_X;
const X_SIZE: u32 = 16u * LD_X;
const S_SIZE: u32 = 4u * RANK4 * LD_S;
#endif
var<workgroup> x_tile: array<vec4<f32>, X_SIZE>;
var<workgroup> s_tile: array<vec4<f32>, S_SIZE>;
var<workgroup> sums: array<vec4<f32>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let slice = lid / BLOCKS;
  let along_x = (lid % BLOCKS) / RANK4;
  let along_rank = lid % RANK4;
  let first_x = (p.first_tile + wg.x) * 16u;
#include "gemm_skinny.inc.wgsl" range
#unroll i 4
  var acc_$i = vec4<f32>(0.0);
#end
  for (var k0 = k_first; k0 < k_last; k0 += DEPTH) {
    workgroupBarrier();
    // Rows and columns beyond the edge repeat the last one and are never stored; elements beyond k_last are zeros.
#if ALONG_ROWS
    for (var at = lid; at < DEPTH * 4u; at += THREADS) {
      let k = k0 + at / 4u;
      let column4 = min(first_x / 4u + at % 4u, p.columns / 4u - 1u);
      var value = vec4<f32>(0.0);
      if (k < k_last) { value = read_x(k * (p.columns / 4u) + column4); }
      x_tile[at] = value;
    }
#else
    for (var at = lid; at < 16u * (DEPTH / 4u); at += THREADS) {
      let row = min(first_x + at / (DEPTH / 4u), p.rows - 1u);
      let k = k0 + 4u * (at % (DEPTH / 4u));
      var value = vec4<f32>(0.0);
      if (k < k_last) { value = read_x((row * p.columns + k) / 4u); }
      x_tile[at / (DEPTH / 4u) * LD_X + at % (DEPTH / 4u)] = value;
    }
#endif
    for (var at = lid; at < 4u * RANK4 * DEPTH; at += THREADS) {
#if RANK_INNER
      let r = at % (4u * RANK4);
      let k = at / (4u * RANK4);
      let source = (k0 + k) * p.ld_s + first_s + r;
#else
      let r = at / DEPTH;
      let k = at % DEPTH;
      let source = (first_s + r) * p.ld_s + k0 + k;
#endif
      var value = 0.0;
      if (r < p.rank && k0 + k < k_last) { value = s[source]; }
#if ALONG_ROWS
      s_tile[k * LD_S + r / 4u][r % 4u] = value;
#else
      s_tile[r * LD_S + k / 4u][k % 4u] = value;
#endif
    }
    workgroupBarrier();
#if ALONG_ROWS
    for (var k = slice; k < DEPTH; k += SLICES) {
      let ranks = s_tile[k * LD_S + along_rank];
      let columns = x_tile[k * LD_X + along_x];
#unroll i 4
      acc_$i = fma(vec4<f32>(columns[$i]), ranks, acc_$i);
#end
    }
#else
    for (var k4 = slice; k4 < DEPTH / 4u; k4 += SLICES) {
#unroll i 4
      let s_$i = s_tile[(4u * along_rank + $iu) * LD_S + k4];
#end
#unroll i 4
      {
        let row = x_tile[(along_x + 4u * $iu) * LD_X + k4];
        acc_$i += vec4<f32>(dot(row, s_0), dot(row, s_1), dot(row, s_2), dot(row, s_3));
      }
#end
    }
#endif
  }
  // acc_i: four ranks of one row or column of X.
#unroll i 4
  workgroupBarrier();
  sums[lid] = acc_$i;
  workgroupBarrier();
  if (lid < BLOCKS) {
    var total = sums[lid];
    for (var other = 1u; other < SLICES; other++) { total += sums[other * BLOCKS + lid]; }
#if ALONG_ROWS
    store(first_x + 4u * along_x + $iu, first_c, 4u * along_rank, p.alpha * total);
#else
    store(first_x + along_x + 4u * $iu, first_c, 4u * along_rank, p.alpha * total);
#endif
  }
#end
}

// Store ranks r to r + 3 of row or column i of X. first_c: the first of the part's ranks in a row of C.
fn store(i: u32, first_c: u32, r: u32, value: vec4<f32>) {
#if ALONG_ROWS
  if (i >= p.columns) { return; }
#else
  if (i >= p.rows) { return; }
#endif
#unroll e 4
  if (r + $eu < p.rank) {
    let to = place(i, first_c + r + $eu);
#if ACCUMULATE
    c[to] += value[$e];
#else
    c[to] = value[$e];
#endif
  }
#end
}
