// The operand b as a Q5_K weight (interface: nf4.inc.wgsl): as Q4_K, with a fifth bit for each code. Rows are
// multiples of 256 elements.
// Source: ggml's dequantize_row_q5_K (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
@group(0) @binding(2) var<storage, read> b: array<Words>;
#include "formats.inc.wgsl" fifth
#include "formats.inc.wgsl" k_scales

struct Unit_b { codes: Words, fifth: u32, element: u32, scales: vec4<u32> }
struct Ready_b { even: Words, odd: Words, scale: f32, least: f32 }  // codes as bytes, of elements 0, 2, 4, 6 and 1, 3, 5, 7

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let element = first_element() + at;
  return Unit_b(b[at / UNIT], fifth[element >> 5u], element, scales[element >> 8u]);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let group = scale_and_least(unit.scales, (unit.element >> 5u) & 7u);
  let high = each(unit.fifth >> (unit.element & 31u), 8u);
  return Ready_b(even_codes(unit.codes, high), odd_codes(unit.codes, high), group.x, group.y);
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  return by_scale_and_least(unit, bytes(word_of(unit.even, first), word_of(unit.odd, first), 0.0));
}
