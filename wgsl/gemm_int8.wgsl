// C = alpha * A Bᵀ (+ U op(V)) + bias + residual (+ C) of operands that gemm_int8_pack.wgsl has rounded to 8 bits: dot products of
// four elements at a time, integer sums over 64 of K, which by their two scales are added to sums in float32.
//   a [16 ceil(K / 64), M padded] u32, a_scales [ceil(K / 64), M padded] f32; b and b_scales likewise, of N
//   all else as in gemm.wgsl, whose tiles these are, with words of four elements for numbers: TILE_K is 16
// Dispatch: a workgroup for each tile: x = of N, y = of M, z = splits of K where SPLIT (then gemm_reduce.wgsl comes behind it).
#include "gemm_bindings.wgsl"
@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read> a_scales: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read> b_scales: array<vec4<f32>>;

const M4: u32 = TILE_M / 4u;
const N4: u32 = TILE_N / 4u;
const TX: u32 = N4 / TN4;  // threads along N
const TY: u32 = M4 / TM4;  // threads along M
const THREADS: u32 = TX * TY;
const BLOCK: u32 = 4u * TILE_K;  // elements of K that a scale is for

var<workgroup> a_tile: array<array<vec4<u32>, M4>, TILE_K>;
var<workgroup> b_tile: array<array<vec4<u32>, N4>, TILE_K>;
var<workgroup> a_scale: array<vec4<f32>, M4>;
var<workgroup> b_scale: array<vec4<f32>, N4>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let tx = lid % TX;
  let ty = lid / TX;
#include "gemm_range.wgsl"
  let a_line = (p.m + TILE_M - 1u) / TILE_M * M4;  // vectors of a row
  let b_line = (p.n + TILE_N - 1u) / TILE_N * N4;

#include "gemm_sums.wgsl"
  var next_a: array<vec4<u32>, LOADS_A>;
  var next_b: array<vec4<u32>, LOADS_B>;
  var next_a_scale: vec4<f32>;
  var next_b_scale: vec4<f32>;

  // As in gemm.wgsl the last tile is staged behind the loop.
  let first_block = k_first / BLOCK;
  let blocks = (k_last - k_first + BLOCK - 1u) / BLOCK;
  {
    let block = first_block;
#include "gemm_int8_fetch.wgsl"
  }
  for (var t = 1u; t < blocks; t++) {
    let block = first_block + t;
    workgroupBarrier();
#include "gemm_int8_stage.wgsl"
    workgroupBarrier();
#include "gemm_int8_fetch.wgsl"
#include "gemm_int8_multiply.wgsl"
  }
  workgroupBarrier();
#include "gemm_int8_stage.wgsl"
  workgroupBarrier();
#include "gemm_int8_multiply.wgsl"
#if HAS_LOWRANK
  // In float32, whose bits lie where those of words did.
  let more = select(0u, (p.rank + TILE_K - 1u) / TILE_K, !SPLIT || wg.z == 0u);
  for (var t = 0u; t < more; t++) {
    workgroupBarrier();
    load_lowrank(t * TILE_K, m0, n0, lid);
    workgroupBarrier();
#include "gemm_multiply.wgsl" floats=bitcast<vec4<f32>>
  }
#endif
#include "gemm_store_tile.wgsl"
}

#if HAS_LOWRANK
fn kept(x: f32) -> u32 { return bitcast<u32>(x); }
#include "gemm_lowrank.wgsl"
#endif
#include "gemm_store.wgsl"
