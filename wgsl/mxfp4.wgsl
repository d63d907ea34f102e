// The operand b as an MXFP4 weight (nf4.wgsl says what such a file gives): codes of an [out, in] matrix, 8 in a u32 from the
// lowest bits on, and the exponent of each 32 of them, 4 in a u32. Rows are multiples of 32 elements.
// Source: ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(8) var<storage, read> exponents: array<u32>;

struct Unit_b { codes: u32, exponents: u32, place: u32 }
struct Ready_b { codes: u32, scale: f32 }

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let block = (first_element() + at) >> 5u;
  return Unit_b(b[at >> 3u], exponents[block >> 2u], block & 3u);
}

// 2^(exponent - 128): codes stand for twice their values below.
fn ready_b(unit: Unit_b) -> Ready_b {
  let e = (unit.exponents >> (8u * unit.place)) & 255u;
  return Ready_b(unit.codes, bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u)));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let codes = vec4<u32>(unit.codes >> (4u * first)) >> vec4<u32>(0u, 4u, 8u, 12u);
  let sizes = (vec4<u32>(0xc8643210u) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u);  // a table of 8 numbers
  let sign = select(vec4<f32>(1.0), vec4<f32>(-1.0), (codes & vec4<u32>(8u)) != vec4<u32>(0u));
  return Four(unit.scale * (sign * vec4<f32>(sizes)));
}
