// The operand b as a Q6_K weight (nf4.wgsl says what such a file gives): of the codes of an [out, in] matrix the low 4 bits,
// 8 in a u32 from the lowest on, and the high 2, 16 in a u32; an int8 scale of each 16 codes, 4 in a u32; a float16 of each
// 256, 2 in a u32. Rows are multiples of 256 elements.
// Source: ggml's dequantize_row_q6_K (github.com/ggml-org/llama.cpp).
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(8) var<storage, read> high_bits: array<u32>;
@group(0) @binding(9) var<storage, read> scales: array<u32>;
@group(0) @binding(10) var<storage, read> d: array<u32>;
#include "half.wgsl"

struct Unit_b { low: u32, high: u32, scales: u32, d: u32, element: u32 }
struct Ready_b { low: u32, high: u32, scale: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  return Unit_b(b[at >> 3u], high_bits[i >> 4u], scales[i >> 6u], d[i >> 9u], i);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
  let scale = bitcast<i32>(unit.scales << (24u - 8u * ((i >> 4u) & 3u))) >> 24u;
  return Ready_b(unit.low, unit.high >> (2u * (i & 15u)), half_of(unit.d, (i >> 8u) & 1u) * f32(scale));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let low = (vec4<u32>(unit.low >> (4u * first)) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
  let high = (vec4<u32>(unit.high >> (2u * first)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(3u);
  return Four(unit.scale * (vec4<f32>(low | (high << vec4<u32>(4u))) - vec4<f32>(32.0)));
}
