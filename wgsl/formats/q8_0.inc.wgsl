// The operand b as a Q8_0 weight (interface: nf4.inc.wgsl): int8 codes of an [out, in] matrix, 4 in a u32, and
// a float16 scale for each 32 of them, 2 in a u32. Rows are multiples of 32 elements.
// Source: ggml's dequantize_row_q8_0 (github.com/ggml-org/llama.cpp).
#if UNIT == 8
alias Codes = vec2<u32>;
#else
alias Codes = vec4<u32>;
#endif
@group(0) @binding(2) var<storage, read> b: array<Codes>;
@group(0) @binding(8) var<storage, read> scales: array<u32>;
#include "formats.inc.wgsl" half

struct Unit_b { codes: Codes, scales: u32, odd: u32 }
struct Ready_b { codes: Codes, scale: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let block = (first_element() + at) >> 5u;
  return Unit_b(b[at / UNIT], scales[block >> 1u], block & 1u);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  return Ready_b(unit.codes, half_of(unit.scales, unit.odd));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let w = unit.codes[first >> 2u];
  return by_scale(unit, vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(w << 24u, w << 16u, w << 8u, w)) >> vec4<u32>(24u)));
}
#include "formats.inc.wgsl" scaled
