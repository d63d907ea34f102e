// The operand b as a Q4_0, Q4_1, Q5_0 or Q5_1 weight (interface: nf4.inc.wgsl): codes of an
// [out, in] matrix, 8 in a u32, lowest bits first; with FIFTH a fifth bit of each. For each 32 codes a float16 scale, 2
// in a u32; with MINIMUM the scale (low) and the float16 minimum, in one u32. Rows are multiples of 32 elements.
// An element is scale (code - 8), with FIFTH scale (code - 16), with MINIMUM scale code + minimum. The product is exact
// in float32: a fused multiply-add gives the same bits.
// Source: ggml's dequantize_row_q4_0 and those of the others (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
#include "formats.inc.wgsl" half
@group(0) @binding(2) var<storage, read> b: array<Words>;
@group(0) @binding(8) var<storage, read> scales: array<u32>;

#if FIFTH
#include "formats.inc.wgsl" fifth
struct Unit_b { codes: Words, scales: u32, element: u32, fifth: u32 }
#else
struct Unit_b { codes: Words, scales: u32, element: u32 }
#endif
// least: the negative of the minimum.
#if FIFTH
struct Ready_b { even: Words, odd: Words, scale: f32, least: f32 }
#else
struct Ready_b { codes: Words, scale: f32, least: f32 }
#endif

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let element = first_element() + at;
#if MINIMUM
  let pair = scales[element >> 5u];
#else
  let pair = scales[element >> 6u];
#endif
#if FIFTH
  return Unit_b(b[at / UNIT], pair, element, fifth[element >> 5u]);
#else
  return Unit_b(b[at / UNIT], pair, element);
#endif
}

fn ready_b(unit: Unit_b) -> Ready_b {
#if MINIMUM
  let scale = half_of(unit.scales, 0u);
  let least = -half_of(unit.scales, 1u);
#else
  let scale = half_of(unit.scales, (unit.element >> 5u) & 1u);
  let least = 0.0;
#endif
#if FIFTH
  let high = each(unit.fifth >> (unit.element & 31u), 8u);
  return Ready_b(even_codes(unit.codes, high), odd_codes(unit.codes, high), scale, least);
#else
  return Ready_b(unit.codes, scale, least);
#endif
}

#if MINIMUM
#include "formats.inc.wgsl" scaled_with_least
#else
#include "formats.inc.wgsl" scaled
#endif

fn four_b(unit: Ready_b, first: u32) -> Four {
#if FIFTH
#if MINIMUM
  return by_scale_and_least(unit, bytes(word_of(unit.even, first), word_of(unit.odd, first), 0.0));
#else
  return by_scale(unit, bytes(word_of(unit.even, first), word_of(unit.odd, first), 16.0));
#endif
#else
#if MINIMUM
  return by_scale_and_least(unit, nibbles(word_of(unit.codes, first), 0.0));
#else
  return by_scale(unit, nibbles(word_of(unit.codes, first), 8.0));
#endif
#endif
}
