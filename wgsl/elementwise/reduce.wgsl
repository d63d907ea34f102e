// Sums of a whole array, in two deterministic passes: a grid of workgroups, then one.
//   sum_part:  part[slot + group] = (sum x, 0).
//   norm_part: part[slot + group] = (sum of squares of the finite x, number of x that are not finite).
//   finish:    total = sum of all parts.
//   x [n] X_T: f32 or f16 or vec4 of them; part [parts] vec2<f32>; total [1] or [2] f32 (PAIR).
// A number is not finite if its exponent bits are all ones; compilers would fold a comparison with itself.
// Dispatch: `groups` workgroups of 256, each with every groups-th run of 1024 elements of x; finish: one workgroup.
struct Params { n: u32, slot: u32, parts: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read_write> part: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> total: array<f32>;

var<workgroup> shared_sum: array<vec2<f32>, 256>;

fn across(value: C_T) -> f32 {
#if VEC == 4
  return (value.x + value.y) + (value.z + value.w);
#else
  return value;
#endif
}

#include "reduce.inc.wgsl" workgroup name=workgroup_sum type=vec2<f32> tile=shared_sum both=mine+other

@compute @workgroup_size(256)
fn sum_part(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  var sum0 = C_T(0.0); var sum1 = C_T(0.0); var sum2 = C_T(0.0); var sum3 = C_T(0.0);
  for (var base = wg.x * 1024u + lid; base < p.n; base += nwg.x * 1024u) {
#unroll i 4
    let x$i = C_T(x[min(base + $i * 256u, p.n - 1u)]);
#end
#unroll i 4
    sum$i += select(C_T(0.0), x$i, base + $i * 256u < p.n);
#end
  }
  let sum = workgroup_sum(vec2(across((sum0 + sum1) + (sum2 + sum3)), 0.0), lid);
  if (lid == 0u) { part[p.slot + wg.x] = sum; }
}

@compute @workgroup_size(256)
fn norm_part(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  var sum0 = C_T(0.0); var sum1 = C_T(0.0); var sum2 = C_T(0.0); var sum3 = C_T(0.0);
  var bad = C_T(0.0);
  for (var base = wg.x * 1024u + lid; base < p.n; base += nwg.x * 1024u) {
#unroll i 4
    let x$i = C_T(x[min(base + $i * 256u, p.n - 1u)]);
    let bad$i = (bitcast<B_T>(x$i) & B_T(0x7f800000u)) == B_T(0x7f800000u);
#end
#unroll i 4
    if (base + $i * 256u < p.n) {
      let kept = select(x$i, C_T(0.0), bad$i);
      sum$i += kept * kept;
      bad += select(C_T(0.0), C_T(1.0), bad$i);
    }
#end
  }
  let sum = workgroup_sum(vec2(across((sum0 + sum1) + (sum2 + sum3)), across(bad)), lid);
  if (lid == 0u) { part[p.slot + wg.x] = sum; }
}

@compute @workgroup_size(256)
fn finish(@builtin(local_invocation_index) lid: u32) {
  var sum = vec2(0.0);
  for (var i = lid; i < p.parts; i += 256u) { sum += part[i]; }
  sum = workgroup_sum(sum, lid);
  if (lid == 0u) {
    total[0] = sum.x;
#if PAIR
    total[1] = sum.y;
#endif
  }
}
