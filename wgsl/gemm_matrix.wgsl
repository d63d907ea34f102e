// C = alpha * op(A) op(B) (+ U op(V)) + bias + residual (+ C) on matrix units: f16 operands, f32 sums.
//
// Operands, result, epilogue and dispatch are those of gemm.wgsl; what differs is the unit that multiplies. A subgroup of 32
// invocations owns SUB_M x 16 rows and SUB_G x SUB_J x 16 columns of C as cooperative matrices of 16 x 16; a workgroup is
// SG_M x SG_N subgroups. Tiles of A and B stand in workgroup memory as they lie in their arrays (rows padded by 16 bytes, so
// that rows start in different banks), as f16: f32 and bf16 operands and decoded NF4 weights are rounded on their way in.
// The next tile, or with AHEAD the one after it, is fetched into registers while this one is multiplied. Sums leave through
// workgroup memory, where each subgroup has a strip of 16 rows, because what a cooperative matrix holds cannot be indexed.
// Wants: the contiguous dimension of A and of B, and N, a multiple of 8; subgroups of 32.
// Source: the tiling of NVIDIA's CUTLASS (github.com/NVIDIA/cutlass, "Efficient GEMM in CUDA").
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm_bindings.wgsl"
alias Four = vec4<f16>;
#include "gemm_matrix_dense.wgsl" x=a binding=1 kind=A_KIND
#include B_FORMAT x=b binding=2 kind=B_KIND

const THREADS: u32 = 32u * SG_M * SG_N;
const TILE_M: u32 = 16u * SUB_M * SG_M;
const TILE_N: u32 = 16u * SUB_G * SUB_J * SG_N;
// Tiles as they lie in the arrays, in eights; so are lengths of rows.
#include "gemm_matrix_pieces.wgsl"
#if TRANS_A
const A_ROWS: u32 = TILE_K;
const A_COLS: u32 = TILE_M;
#else
const A_ROWS: u32 = TILE_M;
const A_COLS: u32 = TILE_K;
#endif
#if TRANS_B
const B_ROWS: u32 = TILE_N;
const B_COLS: u32 = TILE_K;
#else
const B_ROWS: u32 = TILE_K;
const B_COLS: u32 = TILE_N;
#endif
const A_LD: u32 = A_COLS / 8u + 1u;
const B_LD: u32 = B_COLS / 8u + 1u;
const STRIP: u32 = 4u * SUB_J;  // vec4<f32> in a row of a subgroup's strip

var<workgroup> a_tile: array<Eight, A_ROWS * A_LD>;
var<workgroup> b_tile: array<Eight, B_ROWS * B_LD>;
var<workgroup> strips: array<vec4<f32>, SG_M * SG_N * 16u * STRIP>;

// The start of `width` elements along K, moved back to where the last ones are.
fn inside_k(at: u32, width: u32) -> u32 {
#if K_EDGE
  return min(at, p.k - width);
#else
  return at;
#endif
}

// Row and column, in units, of what an invocation carries of a tile: place `at` of a tile whose rows have `width` units of
// `eights` times 8 elements. Eight invocations side by side store 16 bytes each, in different banks: a row is one eight longer
// than a multiple of four, so they take eight eights of one row, or of several that lie as many apart.
fn place_of(at: u32, width: u32, eights: u32) -> vec2<u32> {
  let side = 8u / eights;  // units of a row that are stored together
  if (width < side) {
    let row = at / width;  // of width * eights == 4: the third bit of its number is that of every fourth row
    return vec2<u32>(row / 8u * 8u + (row / eights & 1u) * 4u + (row / eights / 2u) % (4u / eights) * eights + row % eights,
                     at % width);
  }
  let row = at / (width * eights) * eights + (at / side) % eights;
  return vec2<u32>(row, at % (width * eights) / 8u * side + at % side);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let subgroup = lid / 32u;
  let sub_row = (subgroup / SG_N) * (16u * SUB_M);
  let sub_col = (subgroup % SG_N) * (16u * SUB_G * SUB_J);
  let lda = 2u * A_LD;  // as cooperative matrices take it: in vec4<f16>
  let ldb = 2u * B_LD;
  let ld_strip = STRIP;
#include "gemm_range.wgsl"
  prepare_b(lid);

#unroll i SUB_M
#unroll g SUB_G
#unroll j SUB_J
  var acc_$i_$g_$j = coop_mat16x16<f32, C>();
#end
#end
#end
  // No condition stands around any of this: cooperative operations want uniform control flow.
#include "gemm_matrix_mine.wgsl" x=a loads=LOADS_A cols=A_COLS unit=8u
#include "gemm_matrix_mine.wgsl" x=b loads=LOADS_B cols=B_COLS unit=UNIT
  let tiles = (k_last - k_first + TILE_K - 1u) / TILE_K;
#if HAS_LOWRANK
  let rank = select(0u, p.rank, !SPLIT || wg.z == 0u);
  let first_part = part_of(n0);
#endif
#if LOWRANK_FIRST
  {
    let part = first_part;
    let piece = 0u;
    let s0 = 0u;
#include "gemm_matrix_lowrank_stage.wgsl"
  }
  let first = 0u;
#else
  {
    let k0 = k_first;
#include "gemm_matrix_fetch.wgsl"
#include "gemm_matrix_stage.wgsl" from=next
  }
  let first = 1u;
#endif
#if AHEAD
  // While a tile is multiplied the next is in registers and the one after it on its way there. The last is staged behind the
  // loop: were what the loop has read used in its next pass alone, NVIDIA's compiler would read it there (bench/notes/rejected-tensor-cores.md).
#unroll i LOADS_A
  var ahead_a_$i: Unit_a;
#end
#unroll i LOADS_B
  var ahead_b_$i: Unit_b;
#end
  {
    let k0 = k_first + first * TILE_K;
#include "gemm_matrix_fetch.wgsl"
#include "gemm_matrix_keep.wgsl"
  }
  for (var t = first + 1u; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include "gemm_matrix_fetch.wgsl"
#include "gemm_matrix_multiply.wgsl"
    workgroupBarrier();
    {
      let k0 = k_first + (t - 1u) * TILE_K;
#include "gemm_matrix_stage.wgsl" from=ahead
    }
#include "gemm_matrix_keep.wgsl"
  }
  workgroupBarrier();
#include "gemm_matrix_multiply.wgsl"
  workgroupBarrier();
  {
    let k0 = k_first + (tiles - 1u) * TILE_K;
#include "gemm_matrix_stage.wgsl" from=ahead
  }
#else
  for (var t = first; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include "gemm_matrix_fetch.wgsl"
#include "gemm_matrix_multiply.wgsl"
    workgroupBarrier();
#include "gemm_matrix_stage.wgsl" from=next
  }
#endif
  workgroupBarrier();
#include "gemm_matrix_multiply.wgsl"
#if LOWRANK_LAST
  // The ranks of every part that the tile has columns of, TILE_K at a time. For a float32 result u v is
  // (u high)(v high) + (u rest)(v high) + (u high)(v rest): see gemm_matrix_lowrank.wgsl.
  let last_part = part_of(min(n0 + TILE_N, p.n) - 1u);
  for (var part = first_part; part <= last_part; part++) {
    for (var piece = 0u; piece < PIECES; piece++) {
      for (var s0 = 0u; s0 < rank; s0 += TILE_K) {
        workgroupBarrier();
#include "gemm_matrix_lowrank_stage.wgsl"
        workgroupBarrier();
#include "gemm_matrix_multiply.wgsl"
      }
    }
  }
#endif

  let lane = lid % 32u;
  let strip = subgroup * 16u * STRIP;
#if RESIDUAL_AHEAD
#unroll q STORES
  let row_ahead_$q = m0 + sub_row + (lane + 32u * $qu) / STRIP;
  let col_ahead_$q = n0 + sub_col + (lane + 32u * $qu) % STRIP * 4u;
  var ahead_$q = residual_near(row_ahead_$q, col_ahead_$q, c_base);
#end
#endif
#unroll i SUB_M
#unroll g SUB_G
  {
#unroll j SUB_J
    let s_at_$j = strip + 4u * $ju;
    coopStoreT(acc_$i_$g_$j, &strips[s_at_$j], ld_strip);
#end
    workgroupBarrier();
#if RESIDUAL_AHEAD
#unroll q STORES
    let now_$q = ahead_$q;
    ahead_$q = residual_near(row_ahead_$q + ($iu * SUB_G + $gu + 1u) / SUB_G * 16u,
                             col_ahead_$q + ($gu + 1u) % SUB_G * 16u * SUB_J, c_base);
#end
#endif
#unroll q STORES
    {
      let at = lane + 32u * $qu;
      let row = m0 + sub_row + 16u * $iu + at / STRIP;
      let col = n0 + sub_col + 16u * $gu * SUB_J + (at % STRIP) * 4u;
#if RESIDUAL_AHEAD
      ahead_of_store = now_$q;
#endif
      if (row < p.m && col < p.n) { store(row, col, c_base, strips[strip + at]); }
    }
#end
    workgroupBarrier();
  }
#end
#end
}

#if RESIDUAL_AHEAD
// What is added to four sums of a row, read while those before them are stored; beyond an edge, what is there.
var<private> ahead_of_store: vec4<f32>;

fn residual_near(row: u32, col: u32, base: u32) -> vec4<f32> {
  return vec4<f32>(residual[(base + min(row, p.m - 1u) * p.ldc + p.c_col + min(col, p.n - 4u)) >> 2u]);
}
#endif

#if HAS_LOWRANK
#include "gemm_matrix_lowrank.wgsl"
#endif
#include "gemm_store.wgsl"
