// C = alpha * op(A) op(B) (+ U op(V)) + bias + residual (+ C), tiled, f32 accumulation.
//
//   a [M, K], or [K, M] where TRANS_A (row stride lda, first column a_col)   f32 or f16 (A_KIND)
//   b [K, N], or [N, K] where TRANS_B          f32, f16 or bf16 (B_KIND), or an [out, in] weight of B_FORMAT:
//                                              [N, K] where TRANS_B (forward), else [K, N] (dx)
//   c [M, N] (row stride ldc, first column c_col)   f32 or f16 (C_T); with SPLIT f32 partial sums [splits, M, N]
//   bias [N] f32, residual [M, N] f32 or f16 (R_T)
//   with EXPERTS, b has such a matrix for each expert, and rows of A and C are grouped by expert (gemm.inc.wgsl
//   (experts)) u [M, rank] f32, v [N, rank] where TRANS_B, else [rank, N], f32: the LoRA term, computed as more steps
//   of K; with PARTS one term for each weight of a stack (gemm.inc.wgsl (bindings))
//
// Dispatch: x = tiles of N, y = tiles of M, z = batch, or splits of K where SPLIT (then gemm_reduce.wgsl adds the
// partial sums and does the epilogue).
// A workgroup owns a TILE_M x TILE_N tile of C. Its invocations form a grid of TILE_M / (4 TM4) by TILE_N / (4 TN4);
// each owns TM4 x TN4 blocks of 4 x 4, spread over the tile so that a warp reads and writes whole lines. Tiles of A and
// B are k-major in workgroup memory. The next tile is loaded into registers while this one is multiplied.
// Kinds: 0 f32, 1 f16, 2 bf16 (common.inc.wgsl (dense)).
// VEC_x: the row length of that operand is a multiple of 4, and 4 elements are read at a time.
// Source: the register-tiled matmul of V. Volkov and J. Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008.

#include "gemm.inc.wgsl" bindings
#include "gemm.inc.wgsl" experts
alias Four = vec4<f32>;
#include "gemm.inc.wgsl" dense x=a binding=1 kind=A_KIND vec=VEC_A
#include B_FORMAT x=b binding=2 kind=B_KIND vec=VEC_B

const M4: u32 = TILE_M / 4u;
const N4: u32 = TILE_N / 4u;
const TX: u32 = N4 / TN4;  // threads along N
const TY: u32 = M4 / TM4;  // threads along M
const THREADS: u32 = TX * TY;

var<workgroup> a_tile: array<array<vec4<f32>, M4>, TILE_K>;
var<workgroup> b_tile: array<array<vec4<f32>, N4>, TILE_K>;

// Row or column `at` of C, clamped to the last one.
fn inside(at: u32, end: u32) -> u32 {
#if EDGES
  return min(at, end - 1u);
#else
  return at;
#endif
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let tx = lid % TX;
  let ty = lid / TX;
#include "gemm.inc.wgsl" range
  prepare_b(lid);

#include "gemm.inc.wgsl" sums

  var next_a: array<vec4<f32>, LOADS_A>;
  var next_b: array<Ready_b, LOADS_B>;

  // Tile t is loaded while the one before it is multiplied. The last is stored after the loop: if loads were used only
  // in the loop's next iteration, NVIDIA's compiler would move them there, past the barrier
  // (bench/notes/rejected-float32-gemm.md).
  let tiles = (k_last - k_first + TILE_K - 1u) / TILE_K;
  {
    let k0 = k_first;
#include fetch
  }
  for (var t = 1u; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include stage
    workgroupBarrier();
#include fetch
#include "gemm.inc.wgsl" multiply floats=
  }
#if HAS_LOWRANK
  let more = select(0u, (p.rank + TILE_K - 1u) / TILE_K, !SPLIT || wg.z == 0u);
  for (var t = 0u; t <= more; t++) {
    workgroupBarrier();
    if (t == 0u) {
#include stage
    } else {
      load_lowrank((t - 1u) * TILE_K, m0, n0, lid);
    }
    workgroupBarrier();
#include "gemm.inc.wgsl" multiply floats=
  }
#else
  workgroupBarrier();
#include stage
  workgroupBarrier();
#include "gemm.inc.wgsl" multiply floats=
#endif

#include "gemm.inc.wgsl" store_tile
}

#if HAS_LOWRANK
fn kept(x: f32) -> f32 { return x; }
#include "gemm.inc.wgsl" lowrank
#endif

#include "gemm.inc.wgsl" store

#part fetch
// Part of gemm.wgsl: load one tile of A and B, from k0 on, into registers. With EDGES, rows and columns beyond those of
// C repeat the last one, because they are never stored, and elements beyond k_last are zeros.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
#if TRANS_A
    let row = k0 + at / M4;
    let col = m0 + (at % M4) * 4u;
#if EDGES
    next_a[$i] = vec4<f32>(0.0);
    if (row < k_last && col < p.m)
#endif
    { next_a[$i] = fetch_a(a_base + row * p.lda + p.a_col + col, p.m - col); }
#else
    let row = row_of_a(inside(m0 + at / (TILE_K / 4u), m_end));
    let col = k0 + (at % (TILE_K / 4u)) * 4u;
#if EDGES
    next_a[$i] = vec4<f32>(0.0);
    if (col < k_last)
#endif
    { next_a[$i] = fetch_a(a_base + row * p.lda + p.a_col + col, k_last - col); }
#endif
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
#if TRANS_B
    let row = inside(n0 + at / (TILE_K / UNIT), p.n);
    let col = k0 + (at % (TILE_K / UNIT)) * UNIT;
#if EDGES
    next_b[$i] = Ready_b();
    if (col < k_last)
#endif
    { next_b[$i] = ready_b(fetch_b(b_base + row * p.k + col, k_last - col)); }
#else
    let row = k0 + at / (TILE_N / UNIT);
    let col = n0 + (at % (TILE_N / UNIT)) * UNIT;
#if EDGES
    next_b[$i] = Ready_b();
    if (row < k_last && col < p.n)
#endif
    { next_b[$i] = ready_b(fetch_b(b_base + row * p.n + col, p.n - col)); }
#endif
  }
#end
#endpart

#part stage
// Part of gemm.wgsl: decode what was loaded of A and B, and store it to workgroup memory.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
#if TRANS_A
    if (at < TILE_K * M4) { a_tile[at / M4][at % M4] = next_a[$i]; }
#else
    if (at < TILE_M * (TILE_K / 4u)) {
      let row = at / (TILE_K / 4u);
      let kq = (at % (TILE_K / 4u)) * 4u;
#unroll e 4
      a_tile[kq + $eu][row >> 2u][row & 3u] = next_a[$i][$e];
#end
    }
#endif
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
#if TRANS_B
    if (at < TILE_N * (TILE_K / UNIT)) {
      let col = at / (TILE_K / UNIT);
      let ku = (at % (TILE_K / UNIT)) * UNIT;
#unroll q QUADS
      let four_$q = four_b(next_b[$i], 4u * $qu);
#unroll e 4
      b_tile[ku + 4u * $qu + $eu][col >> 2u][col & 3u] = four_$q[$e];
#end
#end
    }
#else
    if (at < TILE_K * (TILE_N / UNIT)) {
      let row = at / (TILE_N / UNIT);
      let cu = (at % (TILE_N / UNIT)) * QUADS;
#unroll q QUADS
      b_tile[row][cu + $qu] = four_b(next_b[$i], 4u * $qu);
#end
    }
#endif
  }
#end
#endpart
