// The operand b as an IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS or IQ3_S weight (interface: nf4.inc.wgsl): for each CELL elements
// (8 or 4) of an [out, in] matrix, the low 8 bits of the number of an entry of `grid`, 4 in a u32. Rows are multiples
// of 256 elements. An element is +- d (2 scale + 1) FACTOR times its part of the entry.
//   signs  a u32 per 32 elements: the sign of element 8c + 4h + j at bit 8j + 4h + c; NIBBLES: that of element
//          16g + 4q + j at bit 16g + 4j + q. In FORM 0 and 1 the highest 4 bits, the last sign of each 8 elements, are
//          missing: they make the number of negative elements even
//   d      a float16 per 256 elements, 2 in a u32
//   grid   a byte per element, larger by 128. NIBBLES (IQ3_S): 4 bits of a u32, the lowest at bit 1, for elements of
//          -15, -13, .. to 15
//   FORM 0 (XXS)     the highest 4 bits of signs: a scale
//   FORM 1 (IQ2_XS)  the highest 4 bits of signs: the ninth bits of four entries' numbers. scales: a byte per 32
//                    elements, 4 bits per 16
//   FORM 2 (S)       high: bits of entries' numbers above their low 8, and scales of 4 bits. CELL 8: for 32 elements a
//                    byte of four times 2 bits, and a byte of two scales. CELL 4: three u32 for 256 elements: 64 bits,
//                    and eight scales
// Products are exact in float32.
// Source: ggml's dequantize_row_iq2_xxs and those of the others (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" half
#include "formats.inc.wgsl" groups
#include "formats.inc.wgsl" words
#if CELL == 8
alias Codes = u32;
alias Entry = vec2<u32>;
const LOG_CODES = 5u;
const ENTRIES = TABLE_WORDS / 2;
#else
alias Entry = u32;
const ENTRIES = TABLE_WORDS;
#if UNIT == 32
alias Codes = vec2<u32>;
const LOG_CODES = 5u;
#else
alias Codes = u32;
const LOG_CODES = 4u;
#endif
#endif
@group(0) @binding(2) var<storage, read> b: array<Codes>;
@group(0) @binding(8) var<storage, read> signs: array<u32>;
@group(0) @binding(9) var<storage, read> d: array<u32>;
@group(0) @binding(10) var<storage, read> grid: array<Entry>;
#if FORM == 1
@group(0) @binding(11) var<storage, read> scales: array<u32>;
#endif
#if FORM == 2
@group(0) @binding(11) var<storage, read> high: array<u32>;
#endif
#if TABLE
var<workgroup> table: array<Entry, ENTRIES>;  // grid
#endif

struct Unit_b { codes: Codes, signs: u32, high: u32, scales: u32, d: u32, element: u32 }
// Codes, signs, and bits of entries' numbers above their low 8, from bit 8 on; shifted to the unit's first element.
struct Ready_b { codes: Codes, signs: u32, high: u32, scale: Scale }

fn prepare_b(lid: u32) {
#if TABLE
  for (var i = lid; i < ENTRIES; i += THREADS) { table[i] = grid[i]; }
#if PREPARE_BARRIER
  workgroupBarrier();
#endif
#endif
}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  var unit = Unit_b(b[at >> LOG_CODES], signs[i >> 5u], 0u, 0u, d[i >> 9u], i);
#if FORM == 1
  unit.scales = scales[i >> 7u];
#endif
#if FORM == 2
#if CELL == 8
  unit.high = high[i >> 6u];
#else
  let block = 3u * (i >> 8u);
  unit.high = high[block + ((i >> 7u) & 1u)];
  unit.scales = high[block + 2u];
#endif
#endif
  return unit;
}

// Signs with the last of each 8 elements, which makes the number of negative ones even.
fn even(signs: u32) -> u32 {
  let stored = signs & 0x0fffffffu;
  var odd = stored ^ (stored >> 16u);
  odd ^= odd >> 8u;
  odd ^= odd >> 4u;
  return stored | (odd << 28u);
}

// 2 scale + 1, by the bits of floats, as in formats.inc.wgsl (words).
fn odd_scale(scale: Bits) -> Scale {
  return 2.0 * bitcast<Scale>(scale | Bits(0x4b000000u)) - Scale(16777215.0);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
#if UNIT == 32
  let inside = 0u;
#else
  let inside = i & 31u;
#endif
  let size = half_of(unit.d, (i >> 8u) & 1u) * FACTOR;
#if FORM == 0
  let scale = Bits(unit.signs >> 28u);
#endif
#if FORM == 1
  let scale = fields(unit.scales >> ((i >> 2u) & 28u), 4u) & Bits(15u);
  let above = unit.signs >> (20u + (inside >> 3u));
#endif
#if FORM == 2
#if CELL == 8
  let both = unit.high >> ((i & 32u) >> 1u);
  let scale = fields(both >> (8u + ((inside >> 2u) & 4u)), 4u) & Bits(15u);
  let above = (both << 8u) >> (inside >> 2u);
#else
  let scale = fields(unit.scales >> ((i >> 3u) & 28u), 4u) & Bits(15u);
  let above = (unit.high >> ((i >> 2u) & 31u)) << 8u;
#endif
  let all = unit.signs;
#else
  let all = even(unit.signs);
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
#if FORM == 0
  let above = 0u;
#endif
#if NIBBLES
  let negative = all >> ((inside & 16u) + ((inside >> 2u) & 3u));
#else
  let negative = all >> (inside >> 3u);
#endif
  return Ready_b(codes, negative, above, size * odd_scale(scale));
}

fn entry_at(place: u32) -> Entry {
#if TABLE
  return table[place];
#else
  return grid[place];
#endif
}

// Small integers become floats by their bits, as in formats.inc.wgsl (words): conversions take longer (NVIDIA). Signs
// are applied to four elements at once: their fields are complemented, and a byte 128 + v becomes 128 - v.
fn four_b(unit: Ready_b, first: u32) -> Four {
#if CELL == 8
  var number = (unit.codes >> (first & 24u)) & 255u;
#if FORM == 1
  number |= (unit.high >> (first >> 3u)) & 0x100u;
#endif
#if FORM == 2
  number |= (unit.high >> ((first >> 2u) & 6u)) & 0x300u;
#endif
  let sizes = entry_at(number)[(first >> 2u) & 1u];
#else
#if UNIT == 32
  var number = (unit.codes[first >> 4u] >> (2u * (first & 12u))) & 255u;
#else
  var number = (unit.codes >> (2u * first)) & 255u;
#endif
#if FORM == 2
  number |= (unit.high >> (first >> 2u)) & 0x100u;
#endif
  let sizes = entry_at(number);
#endif
#if NIBBLES
  let negative = (unit.signs >> ((first & 16u) + ((first >> 2u) & 3u))) & 0x1111u;
  let fours = vec4<u32>(sizes ^ (negative * 30u)) & vec4<u32>(0x1eu, 0x1e0u, 0x1e00u, 0x1e000u);
  let floats = bitcast<vec4<f32>>(fours | vec4<u32>(0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u));
  return by_scale_at(unit, first, floats - (vec4<f32>(8388608.0, 524288.0, 32768.0, 2048.0) + 15.0));
#else
  let negative = (unit.signs >> ((first >> 3u) + (first & 4u))) & 0x01010101u;
  let signed = (sizes ^ (negative * 255u)) + negative;
  return by_scale_at(unit, first, four_bytes(signed, 128.0));
#endif
}
#include "formats.inc.wgsl" scaled_groups
