// The operand b as a Q5_K weight (nf4.wgsl says what such a file gives): as Q4_K, and a fifth bit of each code, 32 in a u32
// from the lowest on. Rows are multiples of 256 elements.
// Source: ggml's dequantize_row_q5_K (github.com/ggml-org/llama.cpp).
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(9) var<storage, read> fifth: array<u32>;
#include "k_scales.wgsl"

struct Unit_b { codes: u32, fifth: u32, element: u32, scales: vec4<u32> }
struct Ready_b { codes: u32, fifth: u32, scale: f32, least: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let element = first_element() + at;
  return Unit_b(b[at >> 3u], fifth[element >> 5u], element, scales[element >> 8u]);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let group = scale_and_least(unit.scales, (unit.element >> 5u) & 7u);
  return Ready_b(unit.codes, unit.fifth >> (unit.element & 31u), group.x, group.y);
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let low = (vec4<u32>(unit.codes >> (4u * first)) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
  let high = (vec4<u32>(unit.fifth >> first) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u);
  return Four(unit.scale * vec4<f32>(low | (high << vec4<u32>(4u))) - vec4<f32>(unit.least));
}
