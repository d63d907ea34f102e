// The operand b as a Q4_K weight (interface: nf4.inc.wgsl): codes of an [out, in] matrix, 8 in a
// u32, lowest bits first, and their scales (formats.inc.wgsl (k_scales)). Rows are multiples of 256 elements.
// Source: ggml's dequantize_row_q4_K (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
@group(0) @binding(2) var<storage, read> b: array<Words>;
#include "formats.inc.wgsl" k_scales

struct Unit_b { codes: Words, group: u32, scales: vec4<u32> }
struct Ready_b { codes: Words, scale: f32, least: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let element = first_element() + at;
  return Unit_b(b[at / UNIT], (element >> 5u) & 7u, scales[element >> 8u]);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let group = scale_and_least(unit.scales, unit.group);
  return Ready_b(unit.codes, group.x, group.y);
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  return by_scale_and_least(unit, nibbles(word_of(unit.codes, first), 0.0));
}
