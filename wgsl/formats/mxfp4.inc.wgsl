// The operand b as an MXFP4 weight (interface: nf4.inc.wgsl): codes of an [out, in] matrix, 8 in a
// u32, lowest bits first, and an exponent for each 32 of them, 4 in a u32. Rows are multiples of 32 elements.
// Source: ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
@group(0) @binding(2) var<storage, read> b: array<Words>;
@group(0) @binding(8) var<storage, read> exponents: array<u32>;
var<workgroup> level: array<f32, 16>;  // twice the value of each code

struct Unit_b { codes: Words, exponents: u32, place: u32 }
struct Ready_b { codes: Words, scale: f32 }

fn prepare_b(lid: u32) {
  for (var i = lid; i < 16u; i += THREADS) {
    let size = f32((0xc8643210u >> (4u * (i & 7u))) & 15u);
    level[i] = select(size, -size, i > 8u);
  }
#if PREPARE_BARRIER
  workgroupBarrier();
#endif
}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let block = (first_element() + at) >> 5u;
  return Unit_b(b[at / UNIT], exponents[block >> 2u], block & 3u);
}

// 2^(exponent - 128), because levels are twice the values of codes.
fn ready_b(unit: Unit_b) -> Ready_b {
  let e = (unit.exponents >> (8u * unit.place)) & 255u;
  return Ready_b(unit.codes, bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u)));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let w = word_of(unit.codes, first);
  return by_scale(unit, vec4<f32>(level[w & 15u], level[(w >> 4u) & 15u], level[(w >> 8u) & 15u], level[(w >> 12u) & 15u]));
}
#include "formats.inc.wgsl" scaled
