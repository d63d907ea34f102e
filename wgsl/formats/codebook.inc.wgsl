// The operand b as an IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS or IQ3_S weight (interface: nf4.inc.wgsl): for each CELL elements
// (8 or 4) of an [out, in] matrix, the low 8 bits of the number of an entry of `grid`, 4 in a u32. Rows are multiples
// of 256 elements. An element is +- d (2 scale + 1) FACTOR times its part of the entry.
//   FORM 0 (XXS)      signs: a u32 per 32 elements: 7 sign bits per 8 elements (the eighth makes their number even) and
//                     a scale of 4 bits
//   FORM 1 (IQ2_XS)   signs: a byte per 8 elements: 7 sign bits, and the ninth bit of the entry's number
//   FORM 2 (S)        signs: a byte per 8 elements; high: a byte per 32, the entries' numbers above their low 8 bits
//   d                 16-bit fields, 2 in a u32: the float16 d of 256 elements, then (not FORM 0) scales of 4 bits, one
//                     per 16 elements, or per 32 where CELL is 4
//   grid              CELL 8: 16 bits per entry, 2 in a u32; 2 bits per element: 0, 1, 2 stand for 8, 25, 43.
//                     CELL 4, FORM 0: a u32 per entry, 5 bits per element, half of its value; FORM 2: 16 bits per
//                     entry, 4 bits per element. Lowest bits first
// Products are exact in float32.
// Source: ggml's dequantize_row_iq2_xxs and those of the others (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" half
#include "formats.inc.wgsl" groups
#include "formats.inc.wgsl" words
#if CELL == 4
#if UNIT == 32
alias Codes = vec2<u32>;
const LOG_CODES = 5u;
#else
alias Codes = u32;
const LOG_CODES = 4u;
#endif
#else
alias Codes = u32;
const LOG_CODES = 5u;
#endif
@group(0) @binding(2) var<storage, read> b: array<Codes>;
@group(0) @binding(8) var<storage, read> signs: array<u32>;
@group(0) @binding(9) var<storage, read> d: array<u32>;
@group(0) @binding(10) var<storage, read> grid: array<u32>;
#if FORM == 2
@group(0) @binding(11) var<storage, read> high: array<u32>;
#endif
#if TABLE
var<workgroup> table: array<u32, TABLE_WORDS>;  // grid
#endif

struct Unit_b { codes: Codes, signs: u32, high: u32, d: u32, fields: u32, element: u32 }
// Codes, signs and high bits of entries' numbers, shifted to the unit's first element.
struct Ready_b { codes: Codes, signs: u32, high: u32, scale: Scale }

fn prepare_b(lid: u32) {
#if TABLE
  for (var i = lid; i < TABLE_WORDS; i += THREADS) { table[i] = grid[i]; }
#if PREPARE_BARRIER
  workgroupBarrier();
#endif
#endif
}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  var unit = Unit_b(b[at >> LOG_CODES], signs[i >> 5u], 0u, 0u, 0u, i);
#if FORM == 2
  unit.high = high[i >> 7u];
#endif
#if FORM == 0
  unit.d = d[i >> 9u] >> (16u * ((i >> 8u) & 1u));
#else
#if CELL == 8
  let half = 5u * (i >> 8u);
  let group = half + 1u + ((i >> 6u) & 3u);
#else
  let half = 3u * (i >> 8u);
  let group = half + 1u + ((i >> 7u) & 1u);
#endif
  unit.d = d[half >> 1u] >> (16u * (half & 1u));
  unit.fields = d[group >> 1u] >> (16u * (group & 1u));
#endif
  return unit;
}

// Four times 7 signs, a byte each, with the eighth that makes the number of each byte even.
fn even(sevens: u32) -> u32 {
  var odd = sevens ^ ((sevens >> 4u) & 0x07070707u);
  odd ^= (odd >> 2u) & 0x03030303u;
  odd ^= odd >> 1u;
  return sevens | ((odd & 0x01010101u) << 7u);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
  let inside = i & 31u;
  let size = half_value(unit.d & 0xffffu) * FACTOR;
#if FORM == 0
  let scale = Scale(f32(unit.signs >> 28u));
  let w = unit.signs;
  let all = even((w & 0x7fu) | ((w << 1u) & 0x7f00u) | ((w << 2u) & 0x7f0000u) | ((w << 3u) & 0x7f000000u));
  let above = 0u;
#else
#if CELL == 8
  let scale = Scale(fields(unit.fields >> ((i >> 2u) & 12u), 4u) & Bits(15u));
#else
  let scale = Scale(fields(unit.fields >> ((i >> 3u) & 12u), 4u) & Bits(15u));
#endif
#endif
#if FORM == 1
  let all = even(unit.signs & 0x7f7f7f7fu);
  let above = unit.signs >> inside;
#endif
#if FORM == 2
  let all = unit.signs;
  let above = unit.high >> (8u * ((i >> 5u) & 3u) + (inside >> 2u));
#endif
#if CELL == 8
  let codes = unit.codes >> inside;
#else
#if UNIT == 8
  let codes = unit.codes >> (2u * (i & 8u));
#else
  let codes = unit.codes;
#endif
#endif
  return Ready_b(codes, all >> inside, above, size * (2.0 * scale + Scale(1.0)));
}

fn word_at(place: u32) -> u32 {
#if TABLE
  return table[place];
#else
  return grid[place];
#endif
}

// Small integers become floats by their bits, as in formats.inc.wgsl (words): conversions take longer (NVIDIA).
fn four_b(unit: Ready_b, first: u32) -> Four {
#if CELL == 8
  var number = (unit.codes >> (first & 24u)) & 255u;
#if FORM == 1
  number |= ((unit.high >> (first & 24u)) & 128u) << 1u;
#endif
#if FORM == 2
  number |= ((unit.high >> ((first >> 2u) & 6u)) & 3u) << 8u;
#endif
  let levels = twos(word_at(number >> 1u) >> (16u * (number & 1u) + 2u * (first & 4u)), 0.0);
  let sizes = levels * (0.5 * levels + 16.5) + 8.0;
#else
#if UNIT == 32
  var number = (unit.codes[first >> 4u] >> (2u * (first & 12u))) & 255u;
#else
  var number = (unit.codes >> (2u * first)) & 255u;
#endif
#if FORM == 2
  number |= ((unit.high >> (first >> 2u)) & 1u) << 8u;
  let sizes = nibbles(word_at(number >> 1u) >> (16u * (number & 1u)), 0.0);
#else
  let fives = vec4<u32>(word_at(number)) & vec4<u32>(0x1fu, 0x3e0u, 0x7c00u, 0xf8000u);
  let floats = bitcast<vec4<f32>>(fives | vec4<u32>(0x4b000000u, 0x48800000u, 0x46000000u, 0x43800000u));
  let sizes = floats - vec4<f32>(8388608.0, 262144.0, 8192.0, 256.0);
#endif
#endif
  let signs = (vec4<u32>(unit.signs >> first) << vec4<u32>(31u, 30u, 29u, 28u)) & vec4<u32>(0x80000000u);
  return by_scale_at(unit, first, bitcast<vec4<f32>>(bitcast<vec4<u32>>(sizes) | signs));
}
#include "formats.inc.wgsl" scaled_groups
