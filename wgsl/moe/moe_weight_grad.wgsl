// The gradient of the weights of experts: out[e N + n] = alpha * sum over rows s of expert e of dy[s, n] x[s] (+ out).
//   dy [rows, N], x [rows, K] or with GATHER [rows / chosen, K] (row s takes row order[s] / chosen): f32 or f16, read
//   four at a time where N (VEC_DY) and K (VEC_X) are multiples of 4
//   start [experts + 1] i32, order [rows] i32; out [experts N, K] f32, or with SPLIT [shares, experts N, K], which
//   gemm_reduce.wgsl adds up
// Dispatch: x = tiles of K, y = tiles of N, z = experts times shares of an expert's rows. A workgroup of THREADS computes
// TILE_N x TILE_K of one expert's gradient, STEP rows at a time; an invocation 4 QN x 4 QK of it. While STEP rows are
// multiplied, the next are loaded.
struct Params { n: u32, k: u32, chosen: u32, shares: u32, size: u32, alpha: f32, first_x: u32, first_y: u32 }
@group(0) @binding(0) var<uniform> p: Params;
#include "common.inc.wgsl" dense x=dy binding=1 kind=DY_KIND vec=VEC_DY
#include "common.inc.wgsl" dense x=x binding=2 kind=X_KIND vec=VEC_X
@group(0) @binding(3) var<storage, read> start: array<i32>;
#if VEC_X
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;
#else
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
#endif
#if GATHER
@group(0) @binding(5) var<storage, read> order: array<i32>;
#endif

const STEP = 16u;
const DY_WIDTH = TILE_N / 4u;
const X_WIDTH = TILE_K / 4u;
const TX = X_WIDTH / QK;
const TY = DY_WIDTH / QN;
var<workgroup> dy_tile: array<array<vec4<f32>, DY_WIDTH>, STEP>;
var<workgroup> x_tile: array<array<vec4<f32>, X_WIDTH>, STEP>;

fn row_of_x(s: u32) -> u32 {
#if GATHER
  return u32(order[s]) / p.chosen * p.k;
#else
  return s * p.k;
#endif
}

// Four elements of a row. Those beyond the last column repeat others; their sums are not stored.
fn four_dy(s: u32, column: u32) -> vec4<f32> {
#if VEC_DY
  return read_dy((s * p.n + min(column, p.n - 4u)) / 4u);
#else
  var four: vec4<f32>;
#unroll e 4
  four[$e] = read_dy(s * p.n + min(column + $eu, p.n - 1u));
#end
  return four;
#endif
}

fn four_x(row: u32, column: u32) -> vec4<f32> {
#if VEC_X
  return read_x((row + min(column, p.k - 4u)) / 4u);
#else
  var four: vec4<f32>;
#unroll e 4
  four[$e] = read_x(row + min(column + $eu, p.k - 1u));
#end
  return four;
#endif
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let k0 = (p.first_x + wg.x) * TILE_K;
  let n0 = (p.first_y + wg.y) * TILE_N;
  let expert = wg.z / p.shares;
  let end_of_expert = u32(start[expert + 1u]);
  let rows = end_of_expert - u32(start[expert]);
  let of_share = (rows + STEP * p.shares - 1u) / (STEP * p.shares) * STEP;
  let first = min(u32(start[expert]) + wg.z % p.shares * of_share, end_of_expert);
  let end = min(first + of_share, end_of_expert);
  let tx = lid % TX;
  let ty = lid / TX;
#unroll q QN
#unroll r 4
#unroll m QK
  var sum_$q_$r_$m = vec4<f32>(0.0);
#end
#end
#end
  if (first < end) {
    {
      let s0 = first;
#include fetch
#include stage
    }
    for (var s0 = first + STEP; s0 < end; s0 += STEP) {
      workgroupBarrier();
#include fetch
#include multiply
      workgroupBarrier();
#include stage
    }
    workgroupBarrier();
#include multiply
  }
#unroll q QN
#unroll r 4
#unroll m QK
  {
    let row = n0 + 4u * (ty + TY * $qu) + $ru;
    let column = k0 + 4u * (tx + TX * $mu);
    let at = (expert * p.n + row) * p.k + column;
#if VEC_X
    if (row < p.n && column < p.k) {
#include store e=0 value=sum_$q_$r_$m
    }
#else
#unroll e 4
    if (row < p.n && column + $eu < p.k) {
#include store e=$e value=sum_$q_$r_$m[$e]
    }
#end
#endif
  }
#end
#end
#end
}

#part fetch
// Part of moe_weight_grad.wgsl: load STEP rows from s0 on into registers, the last repeated beyond the end.
#unroll l DY_LOADS
      let dy_row_$l = s0 + (lid + THREADS * $lu) / DY_WIDTH;
      let next_dy_$l = four_dy(min(dy_row_$l, end - 1u), n0 + (lid + THREADS * $lu) % DY_WIDTH * 4u);
#end
#unroll l X_LOADS
      let x_row_$l = row_of_x(min(s0 + (lid + THREADS * $lu) / X_WIDTH, end - 1u));
      let next_x_$l = four_x(x_row_$l, k0 + (lid + THREADS * $lu) % X_WIDTH * 4u);
#end
#endpart

#part stage
// Part of moe_weight_grad.wgsl: store what the part fetch has loaded to workgroup memory, zeros of dy beyond the end.
#unroll l DY_LOADS
      if (lid + THREADS * $lu < STEP * DY_WIDTH) {
        let at = lid + THREADS * $lu;
        dy_tile[at / DY_WIDTH][at % DY_WIDTH] = select(vec4<f32>(), next_dy_$l, dy_row_$l < end);
      }
#end
#unroll l X_LOADS
      if (lid + THREADS * $lu < STEP * X_WIDTH) {
        let at = lid + THREADS * $lu;
        x_tile[at / X_WIDTH][at % X_WIDTH] = next_x_$l;
      }
#end
#endpart

#part multiply
// Part of moe_weight_grad.wgsl: sum += dy_tile transposed times x_tile.
      for (var i = 0u; i < STEP; i++) {
#unroll q QN
        let left_$q = dy_tile[i][ty + TY * $qu];
#end
#unroll m QK
        let right_$m = x_tile[i][tx + TX * $mu];
#end
#unroll q QN
#unroll r 4
#unroll m QK
        sum_$q_$r_$m = fma(vec4<f32>(left_$q[$r]), right_$m, sum_$q_$r_$m);
#end
#end
#end
      }
#endpart

#part store e value
// Part of moe_weight_grad.wgsl: store one result, or four.
#if VEC_X
      let place = at / 4u;
#else
      let place = at + $eu;
#endif
#if SPLIT
      out[wg.z % p.shares * p.size + place] = $value;
#else
#if ACCUMULATE
      out[place] += p.alpha * $value;
#else
      out[place] = p.alpha * $value;
#endif
#endif
#endpart
