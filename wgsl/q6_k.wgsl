// The operand b as a Q6_K weight (nf4.wgsl says what such a file gives): of the codes of an [out, in] matrix the low 4 bits,
// 8 in a u32 from the lowest on, and the high 2, 16 in a u32; an int8 scale of each 16 codes, 4 in a u32; a float16 of each
// 256, 2 in a u32. Rows are multiples of 256 elements.
// Source: ggml's dequantize_row_q6_K (github.com/ggml-org/llama.cpp).
#include "words.wgsl"
#include "half.wgsl"
@group(0) @binding(2) var<storage, read> b: array<Words>;
@group(0) @binding(8) var<storage, read> high_bits: array<u32>;
@group(0) @binding(9) var<storage, read> scales: array<u32>;
@group(0) @binding(10) var<storage, read> d: array<u32>;

struct Unit_b { low: Words, high: u32, scales: u32, d: u32, element: u32 }
struct Ready_b { even: Words, odd: Words, scale: f32 }  // codes as bytes, of elements 0, 2, 4, 6 and 1, 3, 5, 7

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  return Unit_b(b[at / UNIT], high_bits[i >> 4u], scales[i >> 6u], d[i >> 9u], i);
}

// Bits 4j and 4j + 1 (4j + 2 and 4j + 3) of sixteen go to bits 8j + 4 and 8j + 5 by two products, of which the first sets
// the upper eight apart; what meets elsewhere carries into none of these.
fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
  let scale = bitcast<i32>(unit.scales << (24u - 8u * ((i >> 4u) & 3u))) >> 24u;
  let high = each(unit.high >> (2u * (i & 15u)), 16u);
  let even = ((((high & Words(0x3333u)) * Words(0x101u)) & Words(0x330033u)) * Words(0x110u)) & Words(0x30303030u);
  let odd = ((((high & Words(0xccccu)) * Words(0x101u)) & Words(0xcc00ccu)) * Words(0x44u)) & Words(0x30303030u);
  let low = Words(0x0f0f0f0fu);
  return Ready_b((unit.low & low) | even, ((unit.low >> Words(4u)) & low) | odd, half_of(unit.d, (i >> 8u) & 1u) * f32(scale));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  return Four(unit.scale * bytes(word_of(unit.even, first), word_of(unit.odd, first), 32.0));
}
