// Round to Q6_K as ggml's quantize_row_q6_K_ref: of 19 candidates for the scale of 16 elements, take the one with the
// least weighted error; then express all of a block in multiples of one unit.
//   x [n] f32, n a multiple of 256; codes, high, scales and d as in device/formats/q6_k.py, in u32.
// Dispatch: ceil(n / 1024) workgroups (folded); an invocation has 16 elements, sixteen invocations a block.
// Source: github.com/ggml-org/llama.cpp, ggml-quants.c.
struct Params { n: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> codes: array<u32>;
@group(0) @binding(3) var<storage, read_write> high: array<u32>;
@group(0) @binding(4) var<storage, read_write> scales: array<u32>;
@group(0) @binding(5) var<storage, read_write> d: array<u32>;

#include "common.inc.wgsl" optimization_barrier
#include "quantize.inc.wgsl" exact

const LEAST = 1e-15;  // smaller groups are zeros
var<workgroup> scale_of: array<f32, 64>;
var<workgroup> field_of: array<u32, 64>;
var<workgroup> unit_of: array<u32, 64>;

fn code(x: vec4<f32>, inverse: f32) -> vec4<f32> { return clamp(round(inverse * x), vec4(-32.0), vec4(31.0)); }

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let group = (wg.x + wg.y * nwg.x) * 64u + lid;
  let there = group * 16u < p.n;
  var largest = 0.0;
#unroll q 4
  var x$q = vec4(0.0);
  if (there) { x$q = x[group * 4u + $qu]; }
  let w$q = times4(x$q, x$q);
  let wx$q = times4(w$q, x$q);
#unroll i 4
  if (abs(x$q[$i]) > abs(largest)) { largest = x$q[$i]; }
#end
#end
  var scale = 0.0;
  var chosen = 0.0;
  if (abs(largest) >= LEAST) {
    var best = 0.0;
    for (var number = 0u; number <= 18u; number++) {
      // The first candidate is the range itself; the others follow in rising order.
      let step = select(f32(number) - 10.0, f32(number) - 9.0, number > 9u);
      var reach = 32.0;
      if (number > 0u) { reach = 32.0 + times(0.1, step); }
      let inverse = divide(-reach, largest);
      var sum_lx = 0.0;
      var sum_l2 = 0.0;
#unroll q 4
      let l$q = code(x$q, inverse);
      sum_lx = in_order(sum_lx, times4(wx$q, l$q));
      sum_l2 = in_order(sum_l2, times4(times4(w$q, l$q), l$q));
#end
      if ((number == 0u && sum_l2 != 0.0) || (sum_l2 > 0.0 && times(sum_lx, sum_lx) > times(best, sum_l2))) {
        scale = divide(sum_lx, sum_l2);
        best = times(scale, sum_lx);
        chosen = inverse;
      }
      if (number == 0u) { chosen = inverse; }
    }
  }
  scale_of[lid] = scale;
  workgroupBarrier();
  var top = 0.0;
  for (var i = 0u; i < 16u; i++) {
    let one = scale_of[(lid & ~15u) + i];
    if (abs(one) > abs(top)) { top = one; }
  }
  let some = abs(top) >= LEAST;
  var unit = 0u;
  var field = 0;
  if (some) {
    let inverse = divide(-128.0, top);
    unit = half_bits(divide(1.0, inverse));
    field = i32(min(round(inverse * scale), 127.0));
  }
  field_of[lid] = u32(field) & 255u;
  unit_of[lid] = unit;
  workgroupBarrier();
  if (!there) { return; }
  let size = unpack2x16float(unit).x * f32(field);
  var two_bits = 0u;
#unroll q 4
  var c$q = code(x$q, chosen);
  if (abs(largest) < LEAST) { c$q = vec4(-32.0); }
  if (size != 0.0) {
    c$q = clamp(round(vec4(divide(x$q.x, size), divide(x$q.y, size), divide(x$q.z, size), divide(x$q.w, size))), vec4(-32.0), vec4(31.0));
  }
  if (!some) { c$q = vec4(-32.0); }
  let n$q = vec4<u32>(c$q + vec4(32.0));
  let half$q = (n$q.x & 15u) | ((n$q.y & 15u) << 4u) | ((n$q.z & 15u) << 8u) | ((n$q.w & 15u) << 12u);
  two_bits |= ((n$q.x >> 4u) | ((n$q.y >> 4u) << 2u) | ((n$q.z >> 4u) << 4u) | ((n$q.w >> 4u) << 6u)) << ($qu * 8u);
#end
  codes[group * 2u] = half0 | (half1 << 16u);
  codes[group * 2u + 1u] = half2 | (half3 << 16u);
  high[group] = two_bits;
  if ((lid & 3u) == 0u) {
    scales[group / 4u] = field_of[lid] | (field_of[lid + 1u] << 8u) | (field_of[lid + 2u] << 16u) | (field_of[lid + 3u] << 24u);
  }
  if ((lid & 31u) == 0u) { d[group / 32u] = unit_of[lid] | (unit_of[lid + 16u] << 16u); }
}
