// The operand b as an NF4 weight: codes of an [out, in] matrix, 8 in a u32, element 2j in the high nibble of byte j;
// the absmax of its blocks as f32 or, NESTED, as bytes: code[byte] * nested_absmax[block of blocks] + offset[0].
//
// Each weight format has such a file. gemm.wgsl, gemm_matrix.wgsl, gemv.wgsl and quantize_decode.wgsl include the one
// that the constant B_FORMAT names (formats.py). They read a weight in units of UNIT consecutive elements:
//   bindings 2 (codes) and 8 to 11 (scales)
//   fetch_b(at, inside) -> Unit_b     loads the unit from element `at` on (a multiple of UNIT) and computes nothing, so
//                                     that nothing waits. inside: elements to the row's end (here always UNIT or more)
//   ready_b(Unit_b) -> Ready_b        the unit with its scale. A zero Ready_b stands for zeros
//   four_b(Ready_b, first) -> Four    elements `first` to first + 3 of the unit. Four: vec4 of f32, or of f16 (HALVES)
//   scaled_b(Ready_b, first, sum, x) -> f32  only with FACTORED, where four_b leaves out the factors that all elements
//                                     of a group share. A unit has GROUPS groups; `first` is the first element of one.
//                                     Returns the group's part of a result, from sum(element x) and sum(x)
//                                     SHUFFLED: called by whole subgroups of 16 invocations or more
//   prepare_b(lid)                    called once by every invocation, before the others. If it fills workgroup memory,
//                                     it ends with a barrier; without PREPARE_BARRIER the caller has one before four_b
// The file may use p.block_shift and p.nested_shift (log2 of elements per block, and of blocks per nested block),
// p.zero, optimization_barrier(), THREADS, Four, and first_element() (of the weight, at which b begins).
//
// A STACKED weight is several weights, one below the other. Their scales are in one array with gaps, and every 64th
// offset is used. p.part_1 and p.part_2 are the first elements of the second and third weight; p.absmax_i and
// p.nested_i are added to the number of a block and of a nested block to find its scale.
// Sources: Dettmers et al., QLoRA (2023), section 3 and appendix E.
#include "formats.inc.wgsl" words
@group(0) @binding(2) var<storage, read> b: array<Words>;
#if NESTED
@group(0) @binding(8) var<storage, read> absmax: array<u32>;
@group(0) @binding(9) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(10) var<storage, read> nested_code: array<f32>;
@group(0) @binding(11) var<storage, read> nested_offset: array<f32>;
#if STACKED
var<private> offsets: vec3<f32>;
#endif
#if TABLE
var<workgroup> table: array<f32, 256>;  // nested_code, if workgroup memory has room for it
#endif
#else
@group(0) @binding(8) var<storage, read> absmax: array<f32>;
#endif
#if SHUFFLED
var<private> my_level: f32;  // one of the sixteen; others are read from other invocations of the subgroup
#else
var<workgroup> level: array<f32, 16>;  // in sixteen banks, so that different codes do not conflict
#endif

#if NESTED
#if STACKED
struct Unit_b { codes: Words, absmax: u32, nested: f32, offset: f32 }
#else
struct Unit_b { codes: Words, absmax: u32, nested: f32 }
#endif
#else
struct Unit_b { codes: Words, absmax: f32 }
#endif
struct Ready_b { codes: Words, scale: f32 }

fn prepare_b(lid: u32) {
  var levels = array<f32, 16>(
#unroll i 16
    LEVEL_$i,
#end
  );
#if SHUFFLED
  my_level = levels[lid & 15u];
#else
  for (var i = lid; i < 16u; i += THREADS) { level[i] = levels[i]; }
#endif
#if NESTED
#if STACKED
  offsets = vec3<f32>(nested_offset[0], nested_offset[64], nested_offset[min(128u, arrayLength(&nested_offset) - 64u)]);
#endif
#if TABLE
  for (var i = lid; i < 256u; i += THREADS) { table[i] = nested_code[i]; }
#endif
#endif
#if PREPARE_BARRIER
  workgroupBarrier();
#endif
}

fn fetch_b(at: u32, inside: u32) -> Unit_b {
#if STACKED
  let element = first_element() + at;
  let second = element >= p.part_1;
  let third = element >= p.part_2;
  let block = (element >> p.block_shift) + select(select(0u, p.absmax_1, second), p.absmax_2, third);
#if NESTED
  let outer = (block >> p.nested_shift) + select(select(0u, p.nested_1, second), p.nested_2, third);
  let offset = select(select(offsets.x, offsets.y, second), offsets.z, third);
  return Unit_b(b[at / UNIT], (absmax[block >> 2u] >> (8u * (block & 3u))) & 255u, nested_absmax[outer], offset);
#else
  return Unit_b(b[at / UNIT], absmax[block]);
#endif
#else
  let block = (first_element() + at) >> p.block_shift;
#if NESTED
  return Unit_b(b[at / UNIT], (absmax[block >> 2u] >> (8u * (block & 3u))) & 255u, nested_absmax[block >> p.nested_shift]);
#else
  return Unit_b(b[at / UNIT], absmax[block]);
#endif
#endif
}

fn ready_b(unit: Unit_b) -> Ready_b {
#if NESTED
#if TABLE
  let code = table[unit.absmax];
#else
  let code = nested_code[unit.absmax];
#endif
#if STACKED
  let offset = unit.offset;
#else
  let offset = nested_offset[0];  // in a private variable it made dx up to 30 % slower (NVIDIA)
#endif
  // bitsandbytes rounds the product, so this must not become a fused multiply-add. Drivers may fuse, and WGSL cannot
  // forbid it.
  return Ready_b(unit.codes, bitcast<f32>(optimization_barrier(bitcast<u32>(code * unit.nested))) + offset);
#else
  return Ready_b(unit.codes, unit.absmax);
#endif
}

fn four_b(unit: Ready_b, first: u32) -> Four {
  let w = word_of(unit.codes, first);
#if SHUFFLED
  let levels = vec4<f32>(subgroupShuffle(my_level, (w >> 4u) & 15u), subgroupShuffle(my_level, w & 15u),
                         subgroupShuffle(my_level, (w >> 12u) & 15u), subgroupShuffle(my_level, (w >> 8u) & 15u));
#else
  let levels = vec4<f32>(level[(w >> 4u) & 15u], level[w & 15u], level[(w >> 12u) & 15u], level[(w >> 8u) & 15u]);
#endif
#if FACTORED
  return Four(levels);
#else
  return Four(rounded(unit.scale * levels));
#endif
}

#include "formats.inc.wgsl" scaled

// scale * level, rounded to nearest even in float16 (ROUND 1) or bfloat16 (2) by its bits, because WGSL's own rounding
// to 16 bits may go either way.
fn rounded(v: vec4<f32>) -> vec4<f32> {
#if ROUND == 0
  return v;
#else
  let u = bitcast<vec4<u32>>(v);
#if ROUND == 2
  return bitcast<vec4<f32>>((u + vec4<u32>(0x7fffu) + ((u >> vec4<u32>(16u)) & vec4<u32>(1u))) & vec4<u32>(0xffff0000u));
#else
  let size = u & vec4<u32>(0x7fffffffu);
  let exponent = size >> vec4<u32>(23u);
  // Ten bits of the mantissa remain; below 2^-14, one less for each power of 2, down to none at 2^-24.
  let drop = min(vec4<u32>(13u) + (max(exponent, vec4<u32>(113u)) - exponent), vec4<u32>(23u));
  let below_half = (vec4<u32>(1u) << (drop - vec4<u32>(1u))) - vec4<u32>(1u);
  let near = ((size + below_half + ((size >> drop) & vec4<u32>(1u))) >> drop) << drop;
  let least = select(vec4<u32>(0u), vec4<u32>(0x33800000u), size > vec4<u32>(0x33000000u));  // 2^-24 if above 2^-25
  let result = select(near, least, size < vec4<u32>(0x33800000u));
  return bitcast<vec4<f32>>(result | (u & vec4<u32>(0x80000000u)));
#endif
#endif
}
