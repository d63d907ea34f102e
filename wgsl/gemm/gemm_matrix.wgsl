// C = alpha * op(A) op(B) (+ U op(V)) + bias + residual (+ C) on tensor cores: f16 operands, f32 sums.
//
// Operands, result, epilogue and dispatch are those of gemm.wgsl. A subgroup of LANES invocations owns SUB_M x 16 rows
// and SUB_G x SUB_J x 16 columns of C as cooperative matrices of 16 x 16; a workgroup is SG_M x SG_N subgroups. Tiles
// of A and B are in workgroup memory in the layout of their arrays (rows padded by 16 bytes, so that they start in
// different banks), as f16: f32 and bf16 operands and decoded weights are rounded when they are stored there.
// IN_BLOCKS: B, f16, is in blocks of 16 x 16 as quantize_decode.wgsl writes them, so that 32 invocations read four
// whole lines of 128 bytes; its sides are multiples of 16.
// The next tile, or with AHEAD the one after it, is loaded into registers while this one is multiplied. Sums are stored
// through workgroup memory, where each subgroup has a strip of 16 rows, because a cooperative matrix cannot be indexed.
// Needs: the contiguous dimension of A and of B, and N, multiples of 8; subgroups of LANES.
// Source: the tiling of NVIDIA's CUTLASS (github.com/NVIDIA/cutlass, "Efficient GEMM in CUDA").
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm.inc.wgsl" bindings
#include "gemm.inc.wgsl" experts
alias Four = vec4<f16>;
#include "common.inc.wgsl" matrix_dense x=a binding=1 kind=A_KIND
#include B_FORMAT x=b binding=2 kind=B_KIND

const THREADS: u32 = $LANESu * SG_M * SG_N;
const TILE_M: u32 = 16u * SUB_M * SG_M;
const TILE_N: u32 = 16u * SUB_G * SUB_J * SG_N;
// Tiles in the layout of the arrays; row lengths are in eights.
#include "common.inc.wgsl" matrix_pieces
#if TRANS_A
const A_ROWS: u32 = TILE_K;
const A_COLS: u32 = TILE_M;
#else
const A_ROWS: u32 = TILE_M + 16u * TALLER;
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
const STRIP: u32 = 4u * SUB_J;  // vec4<f32> per row of a subgroup's strip

var<workgroup> a_tile: array<Eight, A_ROWS * A_LD - 1u>;  // no padding after the last row
var<workgroup> b_tile: array<Eight, B_ROWS * B_LD - 1u>;
var<workgroup> strips: array<vec4<f32>, SG_M * SG_N * 16u * STRIP>;

// The start of `width` elements along K, clamped to the last ones.
fn inside_k(at: u32, width: u32) -> u32 {
#if K_EDGE
  return min(at, p.k - width);
#else
  return at;
#endif
}

// Row and column, in units, of load `at` of a tile whose rows have `width` units of `eights` times 8 elements. Eight
// neighboring invocations store 16 bytes each, in different banks: a row is one eight longer than a multiple of four,
// so they take eight eights of one row, or of several rows with suitable distances.
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

#if LANES == 32
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#else
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32, @builtin(subgroup_id) subgroup_id: u32) {
#endif
#include "common.inc.wgsl" subgroup_index
  let lda = 2u * A_LD;  // row stride for cooperative loads, in vec4<f16>
  let ldb = 2u * B_LD;
  let ld_strip = STRIP;
#include "gemm.inc.wgsl" range
  prepare_b(lid);
#if TALLER
  // A few last rows of an expert are multiplied with the full tile before them, so that the weight is read once less.
  if ((rows_left <= 16u * TALLER) & (m0 != u32(start[expert]))) { return; }
  if ((rows_left > TILE_M) & (rows_left <= A_ROWS)) {
#include tile share=_TALLER
    return;
  }
#endif
#if SHORTER
  // An expert's last rows seldom fill a tile, so there is code for fewer rows, once or twice.
  if (rows_left <= 16u * SG_M * SUB_M_1) {
#include tile share=_1
    return;
  }
#if SHORTER == 2
  if (rows_left <= 16u * SG_M * SUB_M_2) {
#include tile share=_2
    return;
  }
#endif
#endif
#include tile share=
}

#if RESIDUAL_AHEAD
// The residual of four sums, loaded while the sums before them are stored; clamped at edges.
var<private> ahead_of_store: vec4<f32>;

fn residual_near(row: u32, col: u32, base: u32) -> vec4<f32> {
  return vec4<f32>(residual[(base + min(row, p.m - 1u) * p.ldc + p.c_col + min(col, p.n - 4u)) >> 2u]);
}
#endif

#if HAS_LOWRANK
#include lowrank
#endif
#include "gemm.inc.wgsl" store

#part tile share
// Part of gemm_matrix.wgsl: the result of a tile; $share selects the variant for fewer rows (SUB_M$share,
// LOADS_A$share).
  let sub_row = (subgroup / SG_N) * (16u * SUB_M$share);
  let sub_col = (subgroup % SG_N) * (16u * SUB_G * SUB_J);

#unroll i SUB_M$share
#unroll g SUB_G
#unroll j SUB_J
  var acc_$i_$g_$j = coop_mat16x16<f32, C>();
#end
#end
#end
  // Nothing below is conditional: cooperative operations need uniform control flow.
#include mine x=a loads=LOADS_A$share cols=A_COLS unit=8u
#include "gemm.inc.wgsl" extra_rows share=$share
#if IN_BLOCKS
#include "gemm.inc.wgsl" mine_in_blocks
#else
#include mine x=b loads=LOADS_B cols=B_COLS unit=UNIT
#endif
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
#include lowrank_stage share=$share
  }
  let first = 0u;
#else
  {
    let k0 = k_first;
#include fetch share=$share
#include "gemm.inc.wgsl" stage from=next share=$share
  }
  let first = 1u;
#endif
#if AHEAD
  // While a tile is multiplied, the next is in registers and the one after it is being loaded. The last is stored after
  // the loop: if loads were used only in the next iteration, NVIDIA's compiler would move them there
  // (bench/notes/rejected-tensor-cores.md).
#unroll i LOADS_A$share
  var ahead_a_$i: Unit_a;
#end
#unroll i LOADS_EXTRA$share
  var ahead_extra_$i: Unit_a;
#end
#unroll i LOADS_B
  var ahead_b_$i: Unit_b;
#end
  {
    let k0 = k_first + first * TILE_K;
#include fetch share=$share
#include "gemm.inc.wgsl" keep share=$share
  }
  for (var t = first + 1u; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include fetch share=$share
#include multiply share=$share
    workgroupBarrier();
    {
      let k0 = k_first + (t - 1u) * TILE_K;
#include "gemm.inc.wgsl" stage from=ahead share=$share
    }
#include "gemm.inc.wgsl" keep share=$share
  }
  workgroupBarrier();
#include multiply share=$share
  workgroupBarrier();
  {
    let k0 = k_first + (tiles - 1u) * TILE_K;
#include "gemm.inc.wgsl" stage from=ahead share=$share
  }
#else
  for (var t = first; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include fetch share=$share
#include multiply share=$share
    workgroupBarrier();
#include "gemm.inc.wgsl" stage from=next share=$share
  }
#endif
  workgroupBarrier();
#include multiply share=$share
#if LOWRANK_LAST
  // The ranks of every part that the tile has columns of, TILE_K at a time. For a float32 result, u v is
  // u_high v_high + u_rest v_high + u_high v_rest (see the part lowrank).
  let last_part = part_of(min(n0 + TILE_N, p.n) - 1u);
  for (var part = first_part; part <= last_part; part++) {
    for (var piece = 0u; piece < PIECES; piece++) {
      for (var s0 = 0u; s0 < rank; s0 += TILE_K) {
        workgroupBarrier();
#include lowrank_stage share=$share
        workgroupBarrier();
#include multiply share=$share
      }
    }
  }
#endif

  let lane = lid % $LANESu;
  let strip = subgroup * 16u * STRIP;
#if RESIDUAL_AHEAD
#unroll q STORES
  let row_ahead_$q = m0 + sub_row + (lane + $LANESu * $qu) / STRIP;
  let col_ahead_$q = n0 + sub_col + (lane + $LANESu * $qu) % STRIP * 4u;
  var ahead_$q = residual_near(row_ahead_$q, col_ahead_$q, c_base);
#end
#endif
#unroll i SUB_M$share
#unroll g SUB_G
  {
#unroll j SUB_J
    let s_at_$j = strip + 4u * $ju;
    coopStoreT(acc_$i_$g_$j, &strips[s_at_$j], ld_strip);
#end
#include "common.inc.wgsl" subgroup_wait
#if RESIDUAL_AHEAD
#unroll q STORES
    let now_$q = ahead_$q;
    ahead_$q = residual_near(row_ahead_$q + ($iu * SUB_G + $gu + 1u) / SUB_G * 16u,
                             col_ahead_$q + ($gu + 1u) % SUB_G * 16u * SUB_J, c_base);
#end
#endif
#unroll q STORES
    {
      let at = lane + $LANESu * $qu;
      let row = m0 + sub_row + 16u * $iu + at / STRIP;
      let col = n0 + sub_col + 16u * $gu * SUB_J + (at % STRIP) * 4u;
#if RESIDUAL_AHEAD
      ahead_of_store = now_$q;
#endif
      if (row < m_end && col < p.n) { store(row, col, c_base, strips[strip + at]); }
    }
#end
#include "common.inc.wgsl" subgroup_wait
  }
#end
#end
#include "gemm.inc.wgsl" store_extra share=$share
#endpart

#part mine x loads cols unit
// Part of gemm_matrix.wgsl: rows and columns of the invocation's $loads units of $unit elements of a tile of $x.
#unroll i $loads
  let $x_place_$i = place_of(lid + $iu * THREADS, $cols / $unit, $unit / 8u);
  let $x_row_$i = $x_place_$i.x;
  let $x_col_$i = $x_place_$i.y * $unit;
#end
#endpart

#part lowrank_stage share
// Part of gemm_matrix.wgsl: copy one piece of ranks s0 to s0 + TILE_K of a part of the LoRA term to workgroup memory.
// All loads precede the stores, so that they overlap.
#unroll i LOADS_A$share
        let u_place_$i = place_of(lid + $iu * THREADS, A_COLS / 8u, 1u);
#if TRANS_A
        let u_row_$i = m0 + 8u * u_place_$i.y;
        let u_low_$i = four_u(u_row_$i, part, s0 + u_place_$i.x, rank);
        let u_high_$i = four_u(u_row_$i + 4u, part, s0 + u_place_$i.x, rank);
#else
        let u_rank_$i = s0 + 8u * u_place_$i.y;
        let u_low_$i = four_u(m0 + u_place_$i.x, part, u_rank_$i, rank);
        let u_high_$i = four_u(m0 + u_place_$i.x, part, u_rank_$i + 4u, rank);
#endif
#end
#unroll i LOADS_V
        let v_place_$i = place_of(lid + $iu * THREADS, B_COLS / 8u, 1u);
#if TRANS_B
        let v_rank_$i = s0 + 8u * v_place_$i.y;
        let v_low_$i = four_v(n0 + v_place_$i.x, part, v_rank_$i, rank);
        let v_high_$i = four_v(n0 + v_place_$i.x, part, v_rank_$i + 4u, rank);
#else
        let v_column_$i = n0 + 8u * v_place_$i.y;
        let v_low_$i = four_v(v_column_$i, part, s0 + v_place_$i.x, rank);
        let v_high_$i = four_v(v_column_$i + 4u, part, s0 + v_place_$i.x, rank);
#endif
#end
#unroll i LOADS_A$share
        let u_to_$i = u_place_$i.x * A_LD + u_place_$i.y;
        a_tile[u_to_$i] = Eight(piece_of(u_low_$i, piece == 1u), piece_of(u_high_$i, piece == 1u));
#end
#unroll i LOADS_V
        let v_to_$i = v_place_$i.x * B_LD + v_place_$i.y;
        b_tile[v_to_$i] = Eight(piece_of(v_low_$i, piece == 2u), piece_of(v_high_$i, piece == 2u));
#end
#endpart

#part fetch share
// Part of gemm_matrix.wgsl: load one tile of A and B, from k0 on, into registers. There is no branch, so that all loads
// overlap: elements beyond an edge are loaded from the edge. Beyond the edges of C they are never stored; beyond the
// end of K the part stage replaces them by zeros.
#unroll i LOADS_A$share
#if TRANS_A
  let a_from_$i = a_base + inside_k(k0 + a_row_$i, 1u) * p.lda + p.a_col + min(m0 + a_col_$i, p.m - 8u);
#else
  let a_from_$i = a_base + row_of_a(min(m0 + a_row_$i, m_end - 1u)) * p.lda + p.a_col + inside_k(k0 + a_col_$i, 8u);
#endif
  let next_a_$i = fetch_a(a_from_$i, 8u);
#end
#include "gemm.inc.wgsl" fetch_extra share=$share
#unroll i LOADS_B
#if IN_BLOCKS
#if TRANS_B
#include "gemm.inc.wgsl" from_blocks row=min(n0+b_row_$i,p.n-1u) column=inside_k(k0+b_col_$i,16u) width=p.k
#else
#include "gemm.inc.wgsl" from_blocks row=inside_k(k0+b_row_$i,16u) column=min(n0+b_col_$i,p.n-1u) width=p.n
#endif
#else
#if TRANS_B
  let b_from_$i = b_base + min(n0 + b_row_$i, p.n - 1u) * p.k + inside_k(k0 + b_col_$i, UNIT);
#else
  let b_from_$i = b_base + inside_k(k0 + b_row_$i, 1u) * p.n + min(n0 + b_col_$i, p.n - UNIT);
#endif
#endif
  let next_b_$i = fetch_b(b_from_$i, UNIT);
#end
#endpart

#part multiply share
// Part of gemm_matrix.wgsl: acc += a_tile times b_tile.
#unroll s K_STEPS
  {
#unroll i SUB_M$share
#if TRANS_A
    let a_at_$i = $su * (16u * A_LD) + (sub_row + 16u * $iu) / 8u;
    let a_$i = coopLoad<coop_mat16x16<f16, A>>(&a_tile[a_at_$i].low, lda);
#else
    let a_at_$i = (sub_row + 16u * $iu) * A_LD + 2u * $su;
    let a_$i = coopLoadT<coop_mat16x16<f16, A>>(&a_tile[a_at_$i].low, lda);
#endif
#end
#unroll g SUB_G
#unroll j SUB_J
#if TRANS_B
    let b_at_$g_$j = (sub_col + 16u * ($gu * SUB_J + $ju)) * B_LD + 2u * $su;
    let b_$g_$j = coopLoad<coop_mat16x16<f16, B>>(&b_tile[b_at_$g_$j].low, ldb);
#else
    let b_at_$g_$j = $su * (16u * B_LD) + (sub_col + 16u * ($gu * SUB_J + $ju)) / 8u;
    let b_$g_$j = coopLoadT<coop_mat16x16<f16, B>>(&b_tile[b_at_$g_$j].low, ldb);
#endif
#end
#end
#unroll i SUB_M$share
#unroll g SUB_G
#unroll j SUB_J
    acc_$i_$g_$j = coopMultiplyAdd(a_$i, b_$g_$j, acc_$i_$g_$j);
#end
#end
#end
#include "gemm.inc.wgsl" multiply_extra share=$share
  }
#end
#endpart

#part lowrank
// Part of gemm_matrix.wgsl: four numbers of the LoRA term, for the part lowrank_stage. Ranks beyond the last are zeros.
// u is divided by alpha, because alpha scales the sum at the end.

// x rounded to f16, or with `rest` the remainder, rounded to f16.
fn piece_of(x: vec4<f32>, rest: bool) -> vec4<f16> {
#if PIECES == 1
  return vec4<f16>(x);
#else
  let high = held(x);
  return vec4<f16>(select(high, x - high, rest));
#endif
}

#if TRANS_A
// Rank s of four rows of C.
fn four_u(row: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  var x = vec4<f32>();
#unroll e 4
  x[$e] = u[min(row + $eu, p.m - 1u) * p.ld_u + part * p.rank + min(s, p.rank - 1u)];
#end
  return select(vec4<f32>(), x * (1.0 / p.alpha), s < rank);
}
#else
// Four ranks, s to s + 3, of a row of C.
fn four_u(row: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let first = min(row, p.m - 1u) * p.ld_u + part * p.rank;
#if VEC_U
  return select(vec4<f32>(), u[(first + min(s, p.rank - 4u)) / 4u] * (1.0 / p.alpha), s < rank);
#else
  var x = vec4<f32>();
#unroll e 4
  x[$e] = select(0.0, u[first + min(s + $eu, p.rank - 1u)] * (1.0 / p.alpha), s + $eu < rank);
#end
  return x;
#endif
}
#endif

#if TRANS_B
// Four ranks of a column of C; zeros if it belongs to another part.
fn four_v(column: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let at = min(column, p.n - 1u);
  let first = (p.c_col + at) * p.rank;
  let mine = part_of(at) == part;
#if VEC_V
  return select(vec4<f32>(), v[(first + min(s, p.rank - 4u)) / 4u], mine && s < rank);
#else
  var x = vec4<f32>();
#unroll e 4
  x[$e] = select(0.0, v[first + min(s + $eu, p.rank - 1u)], mine && s + $eu < rank);
#end
  return x;
#endif
}
#else
// Rank s of four columns of C, which are of one part.
fn four_v(column: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let at = min(column, p.n - 4u);
  return select(vec4<f32>(), v[(min(s, p.rank - 1u) * p.n + at) / 4u], s < rank && part_of(at) == part);
}
#endif
#endpart
