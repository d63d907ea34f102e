// The operand b as an IQ4_NL, IQ4_XS or NVFP4 weight (interface: nf4.inc.wgsl): 4-bit codes of an [out, in] matrix, 8
// in a u32, lowest bits first, each standing for one of sixteen levels; and the factors of groups of levels:
//   SCALES 0 (IQ4_NL)   a float16 per 32 elements, 2 in a u32
//   SCALES 1 (IQ4_XS)   two u32 per 256: the float16 d (low) and the high 2 bits of eight scales; their low 4 bits. The
//                       factor is d (scale - 32). Rows are multiples of 256 elements
//   SCALES 2 (NVFP4)    a byte per 16, 4 in a u32: E4M3, where the sign is ignored and 127 is 0. Levels are twice the
//                       codes' values. Rows are multiples of 64 elements
// Sources: ggml's dequantize_row_iq4_nl, dequantize_row_iq4_xs and dequantize_row_nvfp4
// (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" words
#include "formats.inc.wgsl" half
@group(0) @binding(2) var<storage, read> b: array<Words>;
#if SCALES == 1
alias Scales = vec2<u32>;
#else
alias Scales = u32;
#endif
@group(0) @binding(8) var<storage, read> scales: array<Scales>;
var<workgroup> level: array<f32, 16>;  // in sixteen banks, so that different codes do not conflict

struct Unit_b { codes: Words, scales: Scales, element: u32 }
struct Ready_b { codes: Words, scale: Scale }

fn prepare_b(lid: u32) {
  var levels = array<f32, 16>(
#unroll i 16
    LEVEL_$i,
#end
  );
  for (var i = lid; i < 16u; i += THREADS) { level[i] = levels[i]; }
#if PREPARE_BARRIER
  workgroupBarrier();
#endif
}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let element = first_element() + at;
#if SCALES == 1
  return Unit_b(b[at / UNIT], scales[element >> 8u], element);
#else
  return Unit_b(b[at / UNIT], scales[element >> 6u], element);
#endif
}

fn ready_b(unit: Unit_b) -> Ready_b {
#if SCALES == 0
  let scale = half_of(unit.scales, (unit.element >> 5u) & 1u);
#endif
#if SCALES == 1
  let group = (unit.element >> 5u) & 7u;
  let bits = ((unit.scales.y >> (4u * group)) & 15u) | (((unit.scales.x >> (16u + 2u * group)) & 3u) << 4u);
  let scale = half_of(unit.scales.x, 0u) * (f32(bits) - 32.0);
#endif
#if SCALES == 2
  // With 119 added to its exponent, the byte is a float32 of half its value. With exponent 0 there is no implicit
  // leading one: the value is twice that float, less the one.
  let code = fields(unit.scales >> (8u * ((unit.element >> 4u) & 3u)), 8u) & Bits(255u);
  let float = bitcast<Scale>(((code & Bits(127u)) << Bits(20u)) + Bits(0x3b800000u));
  let small = select(float, 2.0 * float - Scale(0.0078125), (code & Bits(120u)) == Bits(0u));
  let scale = select(small, Scale(0.0), code == Bits(127u));
#endif
  return Ready_b(unit.codes, scale);
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let w = word_of(unit.codes, first);
  return by_scale_at(unit, first, vec4<f32>(level[w & 15u], level[(w >> 4u) & 15u], level[(w >> 8u) & 15u], level[(w >> 12u) & 15u]));
}
#include "formats.inc.wgsl" groups
#include "formats.inc.wgsl" scaled_groups
