// The operand b as a Q4_0 weight (nf4.wgsl says what such a file gives): codes of an [out, in] matrix, 8 in a u32 from the
// lowest bits on, and the float16 scale of each 32 of them, 2 in a u32. Rows are multiples of 32 elements.
// Source: ggml's dequantize_row_q4_0 (github.com/ggml-org/llama.cpp).
#include "words.wgsl"
#include "half.wgsl"
@group(0) @binding(2) var<storage, read> b: array<Words>;
@group(0) @binding(8) var<storage, read> scales: array<u32>;

struct Unit_b { codes: Words, scales: u32, odd: u32 }
struct Ready_b { codes: Words, scale: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let block = (first_element() + at) >> 5u;
  return Unit_b(b[at / UNIT], scales[block >> 1u], block & 1u);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  return Ready_b(unit.codes, half_of(unit.scales, unit.odd));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  return by_scale(unit, nibbles(word_of(unit.codes, first), 8.0));
}
#include "scaled.wgsl"
