// The gradient of the weights of experts: out[e N + n] = alpha * sum over rows s of expert e of dy[s, n] x[s] (+ out).
//   dy [rows, N], x [rows, K] or with GATHER [rows / chosen, K] (row s takes row order[s] / chosen): f32 or f16
//   start [experts + 1] i32, order [rows] i32; out [experts N, K] f32
// Dispatch: x = tiles of K, y = tiles of N, z = experts. A workgroup of 64 computes TILE_N x TILE_K of one expert's
// gradient, 4 x 4 per invocation, STEP rows at a time.
struct Params { n: u32, k: u32, chosen: u32, alpha: f32, first_x: u32, first_y: u32 }
@group(0) @binding(0) var<uniform> p: Params;
#include "common.inc.wgsl" dense x=dy binding=1 kind=DY_KIND vec=SCALAR
#include "common.inc.wgsl" dense x=x binding=2 kind=X_KIND vec=SCALAR
@group(0) @binding(3) var<storage, read> start: array<i32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
#if GATHER
@group(0) @binding(5) var<storage, read> order: array<i32>;
#endif

const STEP = 16u;
const TX = TILE_K / 4u;
var<workgroup> dy_tile: array<array<vec4<f32>, TILE_N / 4u>, STEP>;
var<workgroup> x_tile: array<array<vec4<f32>, TILE_K / 4u>, STEP>;

fn row_of_x(s: u32) -> u32 {
#if GATHER
  return u32(order[s]) / p.chosen * p.k;
#else
  return s * p.k;
#endif
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let k0 = (p.first_x + wg.x) * TILE_K;
  let n0 = (p.first_y + wg.y) * TILE_N;
  let first = u32(start[wg.z]);
  let end = u32(start[wg.z + 1u]);
  let tx = lid % TX;
  let ty = lid / TX;
#unroll r 4
  var sum_$r = vec4<f32>(0.0);
#end
  for (var s0 = first; s0 < end; s0 += STEP) {
    workgroupBarrier();
    for (var at = lid; at < STEP * TILE_N; at += 64u) {
      let s = s0 + at / TILE_N;
      let column = n0 + at % TILE_N;
      var value = 0.0;
      if (s < end && column < p.n) { value = read_dy(s * p.n + column); }
      dy_tile[at / TILE_N][at % TILE_N / 4u][at & 3u] = value;
    }
    for (var at = lid; at < STEP * TILE_K; at += 64u) {
      let s = s0 + at / TILE_K;
      let column = k0 + at % TILE_K;
      var value = 0.0;
      if (s < end && column < p.k) { value = read_x(row_of_x(s) + column); }
      x_tile[at / TILE_K][at % TILE_K / 4u][at & 3u] = value;
    }
    workgroupBarrier();
    for (var i = 0u; i < STEP; i++) {
      let left = dy_tile[i][ty];
      let right = x_tile[i][tx];
#unroll r 4
      sum_$r = fma(vec4<f32>(left[$r]), right, sum_$r);
#end
    }
  }
#unroll r 4
#unroll e 4
  {
    let row = n0 + 4u * ty + $ru;
    let column = k0 + 4u * tx + $eu;
    if (row < p.n && column < p.k) {
      let place = (wg.z * p.n + row) * p.k + column;
#if ACCUMULATE
      out[place] += p.alpha * sum_$r[$e];
#else
      out[place] = p.alpha * sum_$r[$e];
#endif
    }
  }
#end
#end
}
