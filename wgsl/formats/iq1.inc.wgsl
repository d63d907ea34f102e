// The operand b as an IQ1_S or IQ1_M weight (interface: nf4.inc.wgsl): for each 8 elements of an [out, in] matrix, the
// low 8 bits of the number of an entry of `grid`, 4 in a u32. Rows are multiples of 256 elements. An element is
// d (2 scale + 1) times its part of the entry, shifted up or down by an eighth.
//   MEDIUM 0 (IQ1_S)   heads: 16 bits per 32 elements: the high 3 bits of each of four numbers, a scale of 3 bits, and
//                      1 bit to shift down. d: the float16 d of each 256 elements, 2 in a u32
//   MEDIUM 1 (IQ1_M)   heads: 4 bits per 8 elements: the high 3 bits of the number, 1 bit to shift down. d: two u32 per
//                      256 elements, in fields of 16 bits: four scales of 3 bits (16 elements each), then 4 bits of the
//                      float16 d, lowest first
//   grid               16 bits per entry, 2 in a u32; 2 bits per element, lowest first: 0, 1, 2 stand for -1, 0, 1
// Products are exact in float32.
// Sources: ggml's dequantize_row_iq1_s and dequantize_row_iq1_m (github.com/ggml-org/llama.cpp).
#include "formats.inc.wgsl" half
#include "formats.inc.wgsl" groups
#include "formats.inc.wgsl" words
#if MEDIUM
alias Head = vec2<u32>;
const LOG_D = 8u;
#else
alias Head = u32;
const LOG_D = 9u;
#endif
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(8) var<storage, read> heads: array<u32>;
@group(0) @binding(9) var<storage, read> d: array<Head>;
@group(0) @binding(10) var<storage, read> grid: array<u32>;

struct Unit_b { codes: u32, head: u32, d: Head, element: u32 }
struct Ready_b { codes: u32, head: u32, scale: Scale }  // head: as in IQ1_M, shifted to the unit's first element

fn prepare_b(lid: u32) {}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
  let i = first_element() + at;
  return Unit_b(b[at >> 5u], heads[i >> 6u], d[i >> LOG_D], i);
}

fn ready_b(unit: Unit_b) -> Ready_b {
  let i = unit.element;
  let head = unit.head >> ((i & 32u) >> 1u);
#if MEDIUM
  let bits = ((unit.d >> vec2<u32>(12u)) & vec2<u32>(15u)) | ((unit.d >> vec2<u32>(24u)) & vec2<u32>(240u));
  let words = unit.d[(i >> 7u) & 1u] >> ((i & 64u) >> 2u);
  let scale = Scale(fields(words >> (3u * ((i >> 4u) & 3u)), 3u) & Bits(7u));
  let size = half_value(bits.x | (bits.y << 8u));
  let all = head;
#else
  let scale = Scale(f32((head >> 12u) & 7u));
  let size = half_of(unit.d, (i >> 8u) & 1u);
  let down = 0x8888u * ((head >> 15u) & 1u);
  let all = (head & 7u) | ((head << 1u) & 0x70u) | ((head << 2u) & 0x700u) | ((head << 3u) & 0x7000u) | down;
#endif
  return Ready_b(unit.codes >> (i & 24u), all >> ((i & 24u) >> 1u), size * (2.0 * scale + Scale(1.0)));
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let head = unit.head >> ((first & 24u) >> 1u);
  let number = ((unit.codes >> (first & 24u)) & 255u) | ((head & 7u) << 8u);
  let entry = grid[number >> 1u] >> (16u * (number & 1u) + 2u * (first & 4u));
  return by_scale_at(unit, first, twos(entry, 0.0) - vec4<f32>(select(0.875, 1.125, (head & 8u) != 0u)));
}
#include "formats.inc.wgsl" scaled_groups
