// The operand b as a Q6_K weight (interface: nf4.inc.wgsl): the low 4 bits of the codes of an
// [out, in] matrix, 8 in a u32, lowest first, and their high 2 bits, 16 in a u32; an int8 scale for each 16 codes, 4 in
// a u32; a float16 for each 256, 2 in a u32. Rows are multiples of 256 elements.
// Source: ggml's dequantize_row_q6_K (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
#include "formats.inc.wgsl" half
@group(0) @binding(2) var<storage, read> b: array<Words>;
#if UNIT == 32
alias High = vec2<u32>;
alias Scale = vec2<f32>;  // of the first and the second 16 codes
#else
alias High = u32;
alias Scale = f32;
#endif
@group(0) @binding(8) var<storage, read> high_bits: array<High>;
@group(0) @binding(9) var<storage, read> scales: array<u32>;
@group(0) @binding(10) var<storage, read> d: array<u32>;

struct Unit_b { low: Words, high: High, scales: u32, d: u32, element: u32 }
struct Ready_b { low: Words, high: Words, scale: Scale }

// The exponents that make floats of codes at bits 0, 4, 8, 12 (formats.inc.wgsl (words)), and the float of code 32,
// which stands for 0. With one exponent for all four, codes are multiplied by 1, 16, 256, 4096. That is faster for one
// row, and slower for units of 8 on tensor cores (bench/notes/rejected-few-rows.md).
#if TIMES_16
const EXPONENTS = vec4<u32>(0x4b000000u);
const ZERO = 8388608.0 + 32.0 * vec4<f32>(1.0, 16.0, 256.0, 4096.0);
const STEP = vec4<f32>(1.0, 0.0625, 0.00390625, 0.000244140625);
#else
const EXPONENTS = vec4<u32>(0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u);
const ZERO = vec4<f32>(8388608.0, 524288.0, 32768.0, 2048.0) + 32.0;
const STEP = vec4<f32>(1.0);
#endif

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
#if UNIT == 32
  return Unit_b(b[at / UNIT], high_bits[i >> 5u], scales[i >> 6u], d[i >> 9u], i);
#else
  return Unit_b(b[at / UNIT], high_bits[i >> 4u], scales[i >> 6u], d[i >> 9u], i);
#endif
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
  let d = half_of(unit.d, (i >> 8u) & 1u);
  let scales = unit.scales >> (8u * ((i >> 4u) & 3u));
#if UNIT == 32
  let high = vec4<u32>(unit.high, unit.high >> vec2<u32>(16u)).xzyw;
  return Ready_b(unit.low, high, d * vec2<f32>(bitcast<vec2<i32>>(vec2<u32>(scales << 24u, scales << 16u)) >> vec2<u32>(24u)));
#else
  return Ready_b(unit.low, each(unit.high >> (2u * (i & 15u)), 16u), d * f32(bitcast<i32>(scales << 24u) >> 24u));
#endif
}

// The high bits of codes `first` to first + 3, each shifted above its low bits.
fn above(high: u32, first: u32) -> vec4<u32> {
  let mask = vec4<u32>(0x30u, 0x300u, 0x3000u, 0x30000u);
  if ((first & 7u) == 0u) { return vec4<u32>(high << 4u, high << 6u, high << 8u, high << 10u) & mask; }
  return vec4<u32>(high >> 4u, high >> 2u, high, high << 2u) & mask;
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let low = vec4<u32>(word_of(unit.low, first)) & vec4<u32>(0xfu, 0xf0u, 0xf00u, 0xf000u);
  let code = bitcast<vec4<f32>>(low | EXPONENTS | above(eight_of(unit.high, first), first));
#if FACTORED
  return Four(code - ZERO);
#else
  return Four(scale_of(unit, first) * STEP * (code - ZERO));
#endif
}

fn scale_of(unit: Ready_b, element: u32) -> f32 {
#if UNIT == 32
  return unit.scale[element >> 4u];
#else
  return unit.scale;
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return scale_of(unit, first) * sum; }
#endif
