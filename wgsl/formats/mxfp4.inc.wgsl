// The operand b as an MXFP4 weight (interface: nf4.inc.wgsl): codes of an [out, in] matrix, 8 in a
// u32, lowest bits first, and an exponent for each 32 of them, 4 in a u32. Rows are multiples of 32 elements.
// Source: ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
@group(0) @binding(2) var<storage, read> b: array<Words>;
@group(0) @binding(8) var<storage, read> exponents: array<u32>;
struct Unit_b { codes: Words, exponents: u32, place: u32 }

#if HALVES
// Scales as two factors, powers of 2, each of them twice in a word: one of float16 alone may be out of range.
struct Ready_b { codes: Words, scale: u32, rest: u32 }

fn prepare_b(lid: u32) {}
#else
var<workgroup> level: array<f32, 16>;  // twice the value of each code
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
#endif

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let block = (first_element() + at) >> 5u;
  return Unit_b(b[at / UNIT], exponents[block >> 2u], block & 3u);
}

#if HALVES
// Powers of 2 of float16: 2^(e - 15), for two numbers.
fn powers(e: i32) -> u32 { return u32(clamp(e, 1, 30)) * 0x04000400u; }
fn halves(word: u32) -> vec2<f16> { return vec2<f16>(unpack2x16float(word)); }

// 2^14 * 2^(exponent - 127), because codes are converted to their values times 2^-14.
fn ready_b(unit: Unit_b) -> Ready_b {
  let e = i32((unit.exponents >> (8u * unit.place)) & 255u) - 98;
  return Ready_b(unit.codes, powers(e), powers(e - clamp(e, 1, 30) + 15));
}

// The codes at bits 9 and 25 of a word, with their signs at bits 12 and 28. Their lower three bits are the end of a
// float16's exponent and the first bit of its mantissa. Code 1 becomes 2^-15, a denormal number: a GPU that takes it for
// 0 fails the check of tensor cores. Without denormal numbers it takes up to 1.2 times as long.
fn two_of(unit: Ready_b, word: u32) -> vec2<f16> {
  return halves((word & 0x0e000e00u) | ((word << 3u) & 0x80008000u)) * halves(unit.scale) * halves(unit.rest);
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let w = eight_of(unit.codes, first);
  let a = two_of(unit, w << 9u);
  let b = two_of(unit, w << 5u);
  let c = two_of(unit, w << 1u);
  let d = two_of(unit, w >> 3u);
  return select(Four(a.x, b.x, c.x, d.x), Four(a.y, b.y, c.y, d.y), (first & 4u) != 0u);
}
#else
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
#endif
