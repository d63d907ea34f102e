// Products with a side of a LoRA's rank, on matrix units: X f16 [rows, columns], S f32 of that rank, sums and result f32.
//
//   ALONG_ROWS false: C[rows, rank] = alpha * X S,    the reduction along X's columns  (x A^T, dy B)
//   ALONG_ROWS true:  C[rank, columns] = alpha * S X, the reduction along X's rows     (du^T x, dy^T u; + C where ACCUMULATE)
//
// Ranks of a stack of weights (PARTS) and first_rank are as in gemm_skinny.wgsl. S is read as [reduction, rank] (RANK_INNER)
// or [rank, reduction]; C is written transposed where C_TRANS. S goes as f16 in two pieces, what f16 holds of it and what it
// leaves out, so that nothing of it is lost beside float32.
//
// Dispatch: rows, or columns where ALONG_ROWS, / TILE workgroups; y = parts; z = shares of the reduction, of k_per_split each,
// whose sums are left in C [shares, split_size] for gemm_reduce.wgsl (SPLIT).
// A workgroup of SGS subgroups of 32 invocations takes TILE rows or columns of X and walks the reduction in blocks of KB; of a
// block's steps GROUPS subgroups, 16 CF rows or columns each, take one share, the next GROUPS the next, and their sums meet in
// workgroup memory. While a block is multiplied the next AHEAD blocks are in registers or on their way there.
// Wants: subgroups of 32; rows and columns of X multiples of 16; TILE KB a multiple of 8 invocations.
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm_skinny_parameters.wgsl"
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#if VEC_S
@group(0) @binding(2) var<storage, read> s: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> s: array<f32>;
#endif
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

#include "optimisation_barrier.wgsl"
#include "gemm_matrix_pieces.wgsl"

const THREADS: u32 = 32u * SGS;
const TILE: u32 = 16u * CF * GROUPS;
// Blocks lie as X and S do, in eights; rows of an odd number of eights start in different banks. A row of the pieces is of one
// rank, or where ranks lie side by side in S and are read four at a time of one step of the reduction.
#if BY_STEPS
const S_WIDTH: u32 = 2u * RF;
const S_ROWS: u32 = KB;
#else
const S_WIDTH: u32 = KB / 8u;
const S_ROWS: u32 = 16u * RF;
#endif
const S_LD: u32 = S_WIDTH + 1u;
const PIECES: u32 = S_ROWS * S_LD;
#if ALONG_ROWS
const X_WIDTH: u32 = TILE / 8u;
const X_ROWS: u32 = KB;
#else
const X_WIDTH: u32 = KB / 8u;
const X_ROWS: u32 = TILE;
#endif
const X_LD: u32 = X_WIDTH + 1u;

// The fewer bytes, the more workgroups a compute unit runs at once: with 27 KB instead of 23 an H200 takes 1.7 times as long.
var<workgroup> pieces: array<Eight, 2u * PIECES>;
var<workgroup> block: array<Eight, X_ROWS * X_LD>;
var<workgroup> strips: array<vec4<f32>, SGS * 16u * 4u>;

#include "gemm_matrix_skinny_read.wgsl"

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let subgroup = lid / 32u;
  let mine = subgroup % GROUPS * (16u * CF);  // rows or columns of the tile
  let share = subgroup / GROUPS * (16u * STEPS);  // of a block's steps
  let ld = 2u * S_LD;  // as cooperative matrices take it: in vec4<f16>
  let ld_x = 2u * X_LD;
  let ld_strip = 4u;
  let first_x = wg.x * TILE;
#include "gemm_skinny_range.wgsl"
#if SPLIT
  // Of a part that has fewer shares than others some would begin beyond its end: they give zeros.
  let k_begin = min(k_first + wg.z * p.k_per_split, k_last);
  let k_end = min(k_last, k_begin + p.k_per_split);
#else
  let k_begin = k_first;
  let k_end = k_last;
#endif
  let blocks = (k_end - k_begin + KB - 1u) / KB;
  let rounds = (blocks + AHEAD - 1u) / AHEAD;
#unroll i RF
#unroll j CF
  var acc_$i_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll a AHEAD
#unroll e X_LOADS
  var ahead_x_$a_$e: vec4<u32>;
#end
#unroll e S_LOADS
  var ahead_low_$a_$e: vec4<f32>;
  var ahead_high_$a_$e: vec4<f32>;
#end
  {
    let k0 = k_begin + $au * KB;
#include "gemm_matrix_skinny_fetch.wgsl"
#include "gemm_matrix_skinny_keep.wgsl"
  }
#end
  // The last round is staged behind the loop: were what the loop has read used in its next pass alone, NVIDIA's compiler would
  // read it there (bench/notes/rejected-tensor-cores.md).
  for (var n = 1u; n < rounds; n++) {
#unroll a AHEAD
    {
#include "gemm_matrix_skinny_stage.wgsl"
      workgroupBarrier();
      let k0 = k_begin + (n * AHEAD + $au) * KB;
#include "gemm_matrix_skinny_fetch.wgsl"
#include "gemm_matrix_skinny_multiply.wgsl"
      workgroupBarrier();
#include "gemm_matrix_skinny_keep.wgsl"
    }
#end
  }
#unroll a AHEAD
#include "gemm_matrix_skinny_stage.wgsl"
  workgroupBarrier();
#include "gemm_matrix_skinny_multiply.wgsl"
  workgroupBarrier();
#end

#unroll i RF
#unroll j CF
  {
    let strip = subgroup * 64u;
    coopStoreT(acc_$i_$j, &strips[strip], ld_strip);
    workgroupBarrier();
    for (var e = lid; e < 256u * GROUPS; e += THREADS) {
      let at = e % 256u;
      let group = e / 256u;
      var sum = 0.0;
      for (var other = group; other < SGS; other += GROUPS) { sum += strips[other * 64u + at / 4u][at % 4u]; }
#if ALONG_ROWS
      let r = 16u * $iu + at / 16u;
      let i = first_x + 16u * (group * CF + $ju) + at % 16u;
      let inside = r < p.rank && i < p.columns;
#else
      let r = 16u * $iu + at % 16u;
      let i = first_x + 16u * (group * CF + $ju) + at / 16u;
      let inside = r < p.rank && i < p.rows;
#endif
#if SPLIT
      if (inside) { c[wg.z * p.split_size + place(i, first_c + r)] = sum; }
#else
      let to = place(i, first_c + r);
#if ACCUMULATE
      if (inside) { c[to] += sum * p.alpha; }
#else
      if (inside) { c[to] = sum * p.alpha; }
#endif
#endif
    }
    workgroupBarrier();
  }
#end
#end
}
