// The operand b as a Q2_K, Q3_K, TQ1_0 or TQ2_0 weight (interface: nf4.inc.wgsl): 2 bits of each code of an [out, in]
// matrix, 16 in a u32, lowest first. Rows are multiples of 256 elements. Scales:
//   SCALES 0 (Q2_K)   a byte per 16 codes, 4 in a u32: scale (low 4 bits) and minimum; the float16 d (low) and dmin per
//                     256. An element is d scale code - dmin minimum
//   SCALES 1 (Q3_K)   a third bit per code, 32 in a u32; three u32 per 256: the low 4 bits of eight scales (16 codes
//                     each), of the other eight, and the high 2 bits of all; a float16 d per 256, 2 in a u32. An
//                     element is d (scale - 32) (code - 4)
//   SCALES 2 (TQ)     a float16 d per 256, 2 in a u32. An element is d (code - 1)
// Products are exact in float32: a fused multiply-add gives the same bits.
// Sources: ggml's dequantize_row_q2_K, dequantize_row_q3_K and dequantize_row_tq2_0 (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" half
#if UNIT == 32
alias Codes = vec2<u32>;
const LOG_CODES = 5u;
fn codes_from(codes: Codes, first: u32) -> u32 { return codes[first >> 4u] >> (2u * (first & 15u)); }
#else
alias Codes = u32;  // 16 of them; ready_b shifts a unit of 8 to the lower half
const LOG_CODES = 4u;
fn codes_from(codes: Codes, first: u32) -> u32 { return codes >> (2u * first); }
#endif
@group(0) @binding(2) var<storage, read> b: array<Codes>;
#if SCALES == 0
@group(0) @binding(8) var<storage, read> scales: array<u32>;
@group(0) @binding(9) var<storage, read> d: array<u32>;
struct Unit_b { codes: Codes, scales: u32, d: u32, element: u32 }
struct Ready_b { codes: Codes, scale: Scale, least: Scale }
#endif
#if SCALES == 1
@group(0) @binding(8) var<storage, read> third: array<u32>;
@group(0) @binding(9) var<storage, read> scales: array<u32>;
@group(0) @binding(10) var<storage, read> d: array<u32>;
struct Unit_b { codes: Codes, third: u32, low: u32, high: u32, d: u32, element: u32 }
struct Ready_b { codes: Codes, third: u32, scale: Scale }
#endif
#if SCALES == 2
@group(0) @binding(8) var<storage, read> d: array<u32>;
struct Unit_b { codes: Codes, d: u32, element: u32 }
struct Ready_b { codes: Codes, scale: Scale }
#endif

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  let codes = b[at >> LOG_CODES];
#if SCALES == 0
  return Unit_b(codes, scales[i >> 6u], d[i >> 8u], i);
#endif
#if SCALES == 1
  let block = 3u * (i >> 8u);
  return Unit_b(codes, third[i >> 5u], scales[block + ((i >> 7u) & 1u)], scales[block + 2u], d[i >> 9u], i);
#endif
#if SCALES == 2
  return Unit_b(codes, d[i >> 9u], i);
#endif
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
#if UNIT == 8
  let codes = unit.codes >> (2u * (i & 8u));
#else
  let codes = unit.codes;
#endif
#if SCALES == 0
  let bits = fields(unit.scales >> (8u * ((i >> 4u) & 3u)), 8u);
  let least = half_of(unit.d, 1u) * Scale((bits >> Bits(4u)) & Bits(15u));
  return Ready_b(codes, half_of(unit.d, 0u) * Scale(bits & Bits(15u)), least);
#endif
#if SCALES == 1
  let group = (i >> 4u) & 15u;
  let low = fields(unit.low >> (4u * (group & 7u)), 4u) & Bits(15u);
  let bits = low | ((fields(unit.high >> (2u * group), 2u) & Bits(3u)) << Bits(4u));
  let scale = half_of(unit.d, (i >> 8u) & 1u) * (Scale(bits) - Scale(32.0));
  return Ready_b(codes, unit.third >> (i & 31u), scale);
#endif
#if SCALES == 2
  return Ready_b(codes, half_of(unit.d, (i >> 8u) & 1u));
#endif
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let word = codes_from(unit.codes, first);
#if SCALES == 0
#if FACTORED
  return Four(twos(word, 0.0));
#else
  return Four(scale_at(unit.scale, first) * twos(word, 0.0) - vec4<f32>(scale_at(unit.least, first)));
#endif
#endif
#if SCALES == 1
  // As `twos`, with a third bit.
  let third = (vec4<u32>(unit.third >> first) << vec4<u32>(2u, 3u, 4u, 5u)) & vec4<u32>(4u, 16u, 64u, 256u);
  let bits = (vec4<u32>(word) & vec4<u32>(3u, 12u, 48u, 192u)) | third;
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x4a000000u, 0x49000000u, 0x48000000u));
  return by_scale_at(unit, first, floats - (vec4<f32>(8388608.0, 2097152.0, 524288.0, 131072.0) + 4.0));
#endif
#if SCALES == 2
  return by_scale_at(unit, first, twos(word, 1.0));
#endif
}

#include "formats.inc.wgsl" words
#include "formats.inc.wgsl" groups
#if SCALES == 0
#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 {
  return scale_at(unit.scale, first) * sum - scale_at(unit.least, first) * x;
}
#endif
#else
#include "formats.inc.wgsl" scaled_groups
#endif
