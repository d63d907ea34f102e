// GEMM of few rows with a transposed weight, bound by reading the weight once: C = alpha * A Bᵀ + U Vᵀ + bias +
// residual (+ C).
// Operands, result and epilogue are those of gemm.wgsl with TRANS_B; ROWS = M, or 1 with EXPERTS.
//
// Dispatch: ceil(N / (4 THREADS / LANES)) workgroups (folded); with EXPERTS by M + experts, of one row each. A team of
// LANES invocations computes four columns of C: each invocation reads every LANES-th unit of four rows of B, so that
// neighbors read neighboring units, and multiplies it with all rows of A. The team's sums are added in a fixed order:
// with SUBGROUPS by shuffles within a subgroup and then in workgroup memory, else in workgroup memory alone.

#include "gemm.inc.wgsl" bindings
alias Four = vec4<f32>;
#include "gemm.inc.wgsl" dense x=a binding=1 kind=A_KIND vec=VEC_A
#include B_FORMAT x=b binding=2 kind=B_KIND vec=VEC_B

#include "gemm.inc.wgsl" experts

const TEAMS: u32 = THREADS / LANES;
#if EXPERTS
const TILE_M: u32 = ROWS;
const TILE_N: u32 = 4u * TEAMS;
#endif
#if SUBGROUPS
const LEAST_SUBGROUP: u32 = 4u;  // of WebGPU
const SLOTS: u32 = THREADS / min(LANES, LEAST_SUBGROUP);
var<workgroup> parts: array<vec4<f32>, ROWS * SLOTS>;
#else
var<workgroup> parts: array<vec4<f32>, THREADS>;  // of one row of C
#endif

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
#if SUBGROUPS
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) place: u32,
#endif
  @builtin(local_invocation_index) lid: u32,
) {
#if SUBGROUPS
  let me = subgroup * subgroup_size + place;
#else
  let me = lid;
#endif
  let lane = me % LANES;
#if EXPERTS
#include "gemm.inc.wgsl" range
  let col0 = n0 + me / LANES * 4u;
#else
  let m0 = 0u;
  let b_base = 0u;
  let col0 = ((wg.x + wg.y * nwg.x) * TEAMS + me / LANES) * 4u;
#endif
  prepare_b(lid);

  // Columns beyond the edge repeat the last one: they are never stored.
#unroll c 4
  let row_$c = min(col0 + $cu, p.n - 1u);
#end
#unroll r ROWS
  let a_row_$r = row_of_a(m0 + $ru) * p.lda + p.a_col;
#end
#unroll r ROWS
  var sum_$r = vec4<f32>(0.0);
#end
  for (var at = lane * UNIT; at < p.k; at += LANES * UNIT) {
#unroll c 4
    let unit_$c = fetch_b(b_base + row_$c * p.k + at, p.k - at);
#end
#unroll c 4
    let ready_$c = ready_b(unit_$c);
#end
#unroll g GROUPS
    {
#if FACTORED
#unroll r ROWS
      var part_$r = vec4<f32>(0.0);
      var x_sum_$r = 0.0;
#end
#endif
#unroll q GROUP_QUADS
      {
        let first = 4u * ($gu * GROUP_QUADS + $qu);
#unroll c 4
        let b_$c = four_b(ready_$c, first);
#end
#unroll r ROWS
        {
          let x = fetch_a(a_row_$r + at + first, p.k - at - first);
#if FACTORED
          x_sum_$r += (x.x + x.y) + (x.z + x.w);
#endif
#unroll c 4
#if FACTORED
          part_$r[$c] = fma(x.x, b_$c.x, fma(x.y, b_$c.y, fma(x.z, b_$c.z, fma(x.w, b_$c.w, part_$r[$c]))));
#else
#if TEAM
          sum_$r[$c] = fma(x.x, b_$c.x, fma(x.y, b_$c.y, fma(x.z, b_$c.z, fma(x.w, b_$c.w, sum_$r[$c]))));
#else
          sum_$r[$c] += dot(x, b_$c);  // one invocation's sum is long: adding four at a time is more exact
#endif
#endif
#end
        }
#end
      }
#end
#if FACTORED
#unroll r ROWS
#unroll c 4
      sum_$r[$c] += scaled_b(ready_$c, 4u * $gu * GROUP_QUADS, part_$r[$c], x_sum_$r);
#end
#end
#endif
    }
#end
  }
#if HAS_LOWRANK
  // u is divided by alpha, because alpha scales the sum at the end.
  for (var s = lane; s < p.rank; s += LANES) {
    let v4 = vec4<f32>(
#unroll c 4
      v[(p.c_col + row_$c) * p.rank + s],
#end
    );
#unroll r ROWS
    sum_$r += (u[$ru * p.ld_u + part_of(col0) * p.rank + s] / p.alpha) * v4;
#end
  }
#endif

#if SUBGROUPS
  let segment = min(LANES, subgroup_size);
  let slot = me / segment;
#unroll r ROWS
  for (var step = 1u; step < segment; step *= 2u) { sum_$r += subgroupShuffleXor(sum_$r, step); }
  if (lane % segment == 0u) { parts[$ru * SLOTS + slot] = sum_$r; }
#end
  workgroupBarrier();
#endif
#unroll r ROWS
  {
#if SUBGROUPS
    var sum = vec4<f32>(0.0);
    for (var i = 0u; i < LANES; i += segment) { sum += parts[$ru * SLOTS + (me - lane + i) / segment]; }
#else
#if TEAM
    parts[lid] = sum_$r;
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
      workgroupBarrier();
      if (lane < width) { parts[lid] += parts[lid + width]; }
    }
    workgroupBarrier();
    let sum = parts[lid - lane];
    workgroupBarrier();
#else
    let sum = sum_$r;
#endif
#endif
    if (lane == $ru % LANES) { store(m0 + $ru, col0, 0u, sum); }
  }
#end
}

#include "gemm.inc.wgsl" store
