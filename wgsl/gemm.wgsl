// C = alpha * op(A) op(B) (+ U op(V)) + bias + residual (+ C), tiled, f32 accumulation.
//
//   a [M, K], or [K, M] where TRANS_A (row stride lda, first column a_col)   f32 or f16 (A_KIND)
//   b [K, N], or [N, K] where TRANS_B          f32, f16 or bf16 (B_KIND), or an [out, in] weight of B_FORMAT:
//                                              [N, K] where TRANS_B (forward), else [K, N] (dx)
//   c [M, N] (row stride ldc, first column c_col)   f32 or f16 (C_T); with SPLIT f32 partial sums [splits, M, N]
//   bias [N] f32, residual [M, N] f32 or f16 (R_T)
//   u [M, rank] f32, v [N, rank] where TRANS_B, else [rank, N], f32: the LoRA term, read as a few more steps of K; with
//   PARTS that of each of the weights of a stack (gemm_bindings.wgsl)
//
// Dispatch: x = tiles of N, y = tiles of M, z = batch, or splits of K where SPLIT (then gemm_reduce.wgsl adds the partial
// sums and does the epilogue).
// A workgroup owns a TILE_M x TILE_N tile of C. Its threads form a grid of TILE_M / (4 TM4) by TILE_N / (4 TN4); each owns
// TM4 x TN4 blocks of 4 x 4, the blocks half a tile apart so that a warp reads and writes whole lines. Tiles of A and B
// stand in workgroup memory k-major; the next tile is fetched into registers while this one is multiplied.
// Kinds: 0 f32, 1 f16, 2 bf16 (dense.wgsl).
// VEC_x: the row length of that operand is a multiple of 4, and 4 elements are read at a time.
// Source: the register-tiled product of V. Volkov and J. Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008.

#include "gemm_bindings.wgsl"
alias Four = vec4<f32>;
#include "gemm_dense.wgsl" x=a binding=1 kind=A_KIND vec=VEC_A
#include B_FORMAT x=b binding=2 kind=B_KIND vec=VEC_B

const M4: u32 = TILE_M / 4u;
const N4: u32 = TILE_N / 4u;
const TX: u32 = N4 / TN4;  // threads along N
const TY: u32 = M4 / TM4;  // threads along M
const THREADS: u32 = TX * TY;

var<workgroup> a_tile: array<array<vec4<f32>, M4>, TILE_K>;
var<workgroup> b_tile: array<array<vec4<f32>, N4>, TILE_K>;

// Row or column `at` of C, moved back to the last one.
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
#include "gemm_range.wgsl"
  prepare_b(lid);

#include "gemm_sums.wgsl"

  var next_a: array<vec4<f32>, LOADS_A>;
  var next_b: array<Ready_b, LOADS_B>;

  // Tile t is fetched while the one before it is multiplied. The last is staged behind the loop: were what the loop fetches
  // used in its next pass alone, NVIDIA's compiler would read it there, behind the barrier (bench/notes/rejected-float32-gemm.md).
  let tiles = (k_last - k_first + TILE_K - 1u) / TILE_K;
  {
    let k0 = k_first;
#include "gemm_fetch.wgsl"
  }
  for (var t = 1u; t < tiles; t++) {
    let k0 = k_first + t * TILE_K;
    workgroupBarrier();
#include "gemm_stage.wgsl"
    workgroupBarrier();
#include "gemm_fetch.wgsl"
#include "gemm_multiply.wgsl" floats=
  }
#if HAS_LOWRANK
  let more = select(0u, (p.rank + TILE_K - 1u) / TILE_K, !SPLIT || wg.z == 0u);
  for (var t = 0u; t <= more; t++) {
    workgroupBarrier();
    if (t == 0u) {
#include "gemm_stage.wgsl"
    } else {
      load_lowrank((t - 1u) * TILE_K, m0, n0, lid);
    }
    workgroupBarrier();
#include "gemm_multiply.wgsl" floats=
  }
#else
  workgroupBarrier();
#include "gemm_stage.wgsl"
  workgroupBarrier();
#include "gemm_multiply.wgsl" floats=
#endif

#include "gemm_store_tile.wgsl"
}

#if HAS_LOWRANK
fn kept(x: f32) -> f32 { return x; }
#include "gemm_lowrank.wgsl"
#endif

#include "gemm_store.wgsl"
