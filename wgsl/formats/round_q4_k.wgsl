// Round to Q4_K as ggml's quantize_row_q4_K_ref: of 21 candidates for scale and minimum of 32 elements, take the one
// with the least weighted error; then express all of a block in multiples of one unit.
//   x [n] f32, n a multiple of 256; codes and scales as in device/formats/q4_k.py, in u32.
// Dispatch: ceil(n / 2048) workgroups (folded); an invocation has 32 elements, eight invocations a block.
// Source: github.com/ggml-org/llama.cpp, ggml-quants.c.
struct Params { n: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> codes: array<u32>;
@group(0) @binding(3) var<storage, read_write> scales: array<u32>;

#include "common.inc.wgsl" optimization_barrier
#include "quantize.inc.wgsl" exact

var<workgroup> scale_of: array<f32, 64>;
var<workgroup> least_of: array<f32, 64>;
var<workgroup> field_of: array<vec2<u32>, 64>;

fn code(x: vec4<f32>, least: f32, inverse: f32) -> vec4<f32> {
  return clamp(round(inverse * (x - vec4(least))), vec4(0.0), vec4(15.0));
}

// Codes that wait for the scale and the minimum take a quarter of the registers: Intel's GPUs have few.
fn packed(code: vec4<f32>) -> u32 {
  let n = vec4<u32>(code);
  return n.x | (n.y << 8u) | (n.z << 16u) | (n.w << 24u);
}
fn unpacked(codes: u32) -> vec4<f32> { return vec4<f32>((vec4(codes) >> vec4(0u, 8u, 16u, 24u)) & vec4(15u)); }

// The contribution of four elements to the weighted sum of squared errors.
fn cost(x: vec4<f32>, weight: vec4<f32>, code: vec4<f32>, scale: f32, least: f32) -> vec4<f32> {
  let off = times4(vec4(scale), code) + vec4(least) - x;
  return times4(weight, times4(off, off));
}

fn largest_of(values: ptr<function, array<f32, 8>>) -> f32 {
  var largest = 0.0;
  for (var i = 0u; i < 8u; i++) { if ((*values)[i] > largest) { largest = (*values)[i]; } }  // -0 is not larger
  return largest;
}

// value / largest in sixty-thirds, converted to a byte as C does and limited to 63.
fn field(largest: f32, value: f32) -> u32 {
  if (largest <= 0.0) { return 0u; }
  return min(u32(i32(round(divide(63.0, largest) * value))) & 255u, 63u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let group = (wg.x + wg.y * nwg.x) * 64u + lid;
  let there = group * 32u < p.n;
#unroll q 8
  var x$q = vec4(0.0);
  if (there) { x$q = x[group * 8u + $qu]; }
#end
  var squares = 0.0;
  var low = vec4(0.0);
  var top = x0;
#unroll q 8
  squares = in_order(squares, times4(x$q, x$q));
  low = min(low, x$q);
  top = max(top, x$q);
#end
  var least = min(min(low.x, low.y), min(low.z, low.w));
  let high = max(max(top.x, top.y), max(top.z, top.w));
  var scale = 0.0;
  var best_least = least;  // minimum and inverse scale of the chosen codes
  var best_inverse = 0.0;
  if (high != least) {
    let mean = root(squares * 0.03125);
    var sum_w = 0.0;
    var sum_x = 0.0;
    best_inverse = divide(15.0, high - least);
    scale = divide(1.0, best_inverse);
    var best = 0.0;
#unroll q 8
    let w$q = vec4(mean) + abs(x$q);
    sum_w = in_order(sum_w, w$q);
    sum_x = in_order(sum_x, times4(w$q, x$q));
    best = in_order(best, cost(x$q, w$q, code(x$q, least, best_inverse), scale, least));
#end
    for (var number = 0u; number <= 20u; number++) {
      let inverse = divide((-1.0 + times(0.1, f32(number))) + 15.0, high - least);
      var sum_l = 0.0;
      var sum_l2 = 0.0;
      var sum_xl = 0.0;
#unroll q 8
      let l$q = code(x$q, least, inverse);
      let wl$q = times4(w$q, l$q);
      sum_l = in_order(sum_l, wl$q);
      sum_l2 = in_order(sum_l2, times4(wl$q, l$q));
      sum_xl = in_order(sum_xl, times4(wl$q, x$q));
      let packed$q = packed(l$q);
#end
      let determinant = times(sum_w, sum_l2) - times(sum_l, sum_l);
      if (determinant > 0.0) {
        var new_scale = divide(times(sum_w, sum_xl) - times(sum_x, sum_l), determinant);
        var new_least = divide(times(sum_l2, sum_x) - times(sum_l, sum_xl), determinant);
        if (new_least > 0.0) {
          new_scale = divide(sum_xl, sum_l2);
          new_least = 0.0;
        }
        var found = 0.0;
#unroll q 8
        found = in_order(found, cost(x$q, w$q, unpacked(packed$q), new_scale, new_least));
#end
        if (found < best) {
          best = found;
          best_least = least;
          best_inverse = inverse;
          scale = new_scale;
          least = new_least;
        }
      }
    }
  }
  scale_of[lid] = scale;
  least_of[lid] = -least;
  workgroupBarrier();
  var scales_of_block: array<f32, 8>;
  var minima_of_block: array<f32, 8>;
  for (var i = 0u; i < 8u; i++) {
    scales_of_block[i] = scale_of[(lid & ~7u) + i];
    minima_of_block[i] = least_of[(lid & ~7u) + i];
  }
  let top_scale = largest_of(&scales_of_block);
  let top_least = largest_of(&minima_of_block);
  let fields = vec2(field(top_scale, scale), field(top_least, -least));
  field_of[lid] = fields;
  workgroupBarrier();
  if (!there) { return; }
  let units = half_bits(divide(top_scale, 63.0)) | (half_bits(divide(top_least, 63.0)) << 16u);
  let wide = unpack2x16float(units);
  let step = wide.x * f32(fields.x);
  let offset = wide.y * f32(fields.y);
#unroll q 8
  var c$q = code(x$q, best_least, best_inverse);
  if (step != 0.0) {
    let y$q = x$q + vec4(offset);
    c$q = clamp(round(vec4(divide(y$q.x, step), divide(y$q.y, step), divide(y$q.z, step), divide(y$q.w, step))), vec4(0.0), vec4(15.0));
  }
  let n$q = vec4<u32>(c$q);
  let half$q = n$q.x | (n$q.y << 4u) | (n$q.z << 8u) | (n$q.w << 12u);
#end
  codes[group * 4u] = half0 | (half1 << 16u);
  codes[group * 4u + 1u] = half2 | (half3 << 16u);
  codes[group * 4u + 2u] = half4 | (half5 << 16u);
  codes[group * 4u + 3u] = half6 | (half7 << 16u);
  if ((lid & 7u) == 0u) {
    var words = vec4(units, 0u, 0u, 0u);
    for (var i = 0u; i < 8u; i++) {
      let of_group = field_of[lid + i];
      words.y |= (of_group.x & 15u) << (4u * i);
      words.z |= (of_group.y & 15u) << (4u * i);
      words.w |= ((of_group.x >> 4u) << (2u * i)) | ((of_group.y >> 4u) << (2u * i + 16u));
    }
    let at = group / 8u * 4u;
    scales[at] = words.x;
    scales[at + 1u] = words.y;
    scales[at + 2u] = words.z;
    scales[at + 3u] = words.w;
  }
}
