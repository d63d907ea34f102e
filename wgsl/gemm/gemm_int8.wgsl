// C = alpha * A Bᵀ (+ U op(V)) + bias + residual (+ C), for operands that gemm_int8_pack.wgsl has rounded to 8 bits:
// dot products of four elements, exact integer sums over 64 of K, each added to a float32 sum with its two scales.
//   a [16 ceil(K / 64), M padded] u32, a_scales [ceil(K / 64), M padded] f32; b and b_scales likewise, of N
//   all else, and tiles, as in gemm.wgsl, with words of four elements in place of numbers: TILE_K is 16
// Dispatch: one workgroup per tile; x = tiles of N, y = tiles of M, z = splits of K where SPLIT, for gemm_reduce.wgsl.
#include "gemm.inc.wgsl" bindings
@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read> a_scales: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read> b_scales: array<vec4<f32>>;

const M4: u32 = TILE_M / 4u;
const N4: u32 = TILE_N / 4u;
const TX: u32 = N4 / TN4;  // threads along N
const TY: u32 = M4 / TM4;  // threads along M
const THREADS: u32 = TX * TY;
const BLOCK: u32 = 4u * TILE_K;  // elements of K per scale

var<workgroup> a_tile: array<array<vec4<u32>, M4>, TILE_K>;
var<workgroup> b_tile: array<array<vec4<u32>, N4>, TILE_K>;
var<workgroup> a_scale: array<vec4<f32>, M4>;
var<workgroup> b_scale: array<vec4<f32>, N4>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let tx = lid % TX;
  let ty = lid / TX;
#include "gemm.inc.wgsl" range
  let a_line = (p.m + TILE_M - 1u) / TILE_M * M4;  // vectors of a row
  let b_line = (p.n + TILE_N - 1u) / TILE_N * N4;

#include "gemm.inc.wgsl" sums
  var next_a: array<vec4<u32>, LOADS_A>;
  var next_b: array<vec4<u32>, LOADS_B>;
  var next_a_scale: vec4<f32>;
  var next_b_scale: vec4<f32>;

  // As in gemm.wgsl, the last tile is stored after the loop.
  let first_block = k_first / BLOCK;
  let blocks = (k_last - k_first + BLOCK - 1u) / BLOCK;
  {
    let block = first_block;
#include fetch
  }
  for (var t = 1u; t < blocks; t++) {
    let block = first_block + t;
    workgroupBarrier();
#include stage
    workgroupBarrier();
#include fetch
#include multiply
  }
  workgroupBarrier();
#include stage
  workgroupBarrier();
#include multiply
#if HAS_LOWRANK
  // In float32, with the bits stored as words.
  let more = select(0u, (p.rank + TILE_K - 1u) / TILE_K, !SPLIT || wg.z == 0u);
  for (var t = 0u; t < more; t++) {
    workgroupBarrier();
    load_lowrank(t * TILE_K, m0, n0, lid);
    workgroupBarrier();
#include "gemm.inc.wgsl" multiply floats=bitcast<vec4<f32>>
  }
#endif
#include "gemm.inc.wgsl" store_tile
}

#if HAS_LOWRANK
fn kept(x: f32) -> u32 { return bitcast<u32>(x); }
#include "gemm.inc.wgsl" lowrank
#endif
#include "gemm.inc.wgsl" store

#part fetch
// Part of gemm_int8.wgsl: load a block of K of both operands, and their scales, into registers.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
    next_a[$i] = a[(block * TILE_K + at / M4) * a_line + m0 / 4u + at % M4];
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
    next_b[$i] = b[(block * TILE_K + at / N4) * b_line + n0 / 4u + at % N4];
  }
#end
  next_a_scale = a_scales[block * a_line + m0 / 4u + lid % M4];
  next_b_scale = b_scales[block * b_line + n0 / 4u + lid % N4];
#endpart

#part stage
// Part of gemm_int8.wgsl: store what was loaded to workgroup memory.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
    a_tile[at / M4][at % M4] = next_a[$i];
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
    b_tile[at / N4][at % N4] = next_b[$i];
  }
#end
  if (lid < M4) { a_scale[lid] = next_a_scale; }
  if (lid < N4) { b_scale[lid] = next_b_scale; }
#endpart

#part multiply
// Part of gemm_int8.wgsl: multiply the tiles and add to the sums. An integer sum is below 2^21 and starts at the bits
// of 1.5 * 2^23. So its bits are those of a float, which one subtraction turns into the sum.
  {
#unroll i TM4
#unroll r 4
#unroll j TN4
    var sum_$i_$r_$j = vec4<i32>(0x4b400000);
#end
#end
#end
#unroll k TILE_K
    {
#unroll i TM4
      let a$i = a_tile[$k][ty + $iu * TY];
#end
#unroll j TN4
      let b$j = b_tile[$k][tx + $ju * TX];
#end
#unroll i TM4
#unroll r 4
#unroll j TN4
      sum_$i_$r_$j += vec4<i32>(dot4I8Packed(a$i[$r], b$j[0]), dot4I8Packed(a$i[$r], b$j[1]),
                                dot4I8Packed(a$i[$r], b$j[2]), dot4I8Packed(a$i[$r], b$j[3]));
#end
#end
#end
    }
#end
#unroll j TN4
    let by_b$j = b_scale[tx + $ju * TX];
#end
#unroll i TM4
    let by_a$i = a_scale[ty + $iu * TY];
#unroll r 4
#unroll j TN4
    acc[$i * 4 + $r][$j] =
      fma(bitcast<vec4<f32>>(sum_$i_$r_$j) - vec4<f32>(12582912.0), by_a$i[$r] * by_b$j, acc[$i * 4 + $r][$j]);
#end
#end
#end
  }
#endpart
