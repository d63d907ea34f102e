// Round a matrix to 8 bits along the inner dimension (K), in blocks of 64 elements with one scale: the largest becomes
// 127 or -127, the others are rounded to nearest.
//   b [rows, columns]: an array of f32, f16 or bf16 (B_KIND), or a weight of B_FORMAT. ACROSS: K is its rows, else its
//   columns. The other dimension, I, is padded to whole tiles of the GEMM, whose padding no result uses.
//   made_words [16 ceil(K / 64), padded] u32: four along K, the first lowest
//   made_scales [ceil(K / 64), padded] f32; not finite if an element of the block is not
// Dispatch: a workgroup per 64 of K by 32 of I: x = columns / BLOCK_COLUMNS, y = rows / BLOCK_ROWS.
struct Params {
  rows: u32, columns: u32, padded: u32, block_shift: u32, nested_shift: u32, zero: u32,
  part_1: u32, part_2: u32, absmax_1: u32, absmax_2: u32, nested_1: u32, nested_2: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> made_words: array<u32>;
@group(0) @binding(4) var<storage, read_write> made_scales: array<f32>;

#include "common.inc.wgsl" optimization_barrier
const THREADS: u32 = 128u;
alias Four = vec4<f32>;
fn first_element() -> u32 { return 0u; }
#include B_FORMAT x=b binding=2 kind=B_KIND vec=VEC_B

const LINE: u32 = BLOCK_COLUMNS + 1u;  // padded: neither rows nor columns of a block are in one bank
var<workgroup> block: array<f32, BLOCK_ROWS * LINE>;
var<workgroup> peaks: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  prepare_b(lid);
  let row0 = wg.y * BLOCK_ROWS;
  let column0 = wg.x * BLOCK_COLUMNS;
#unroll i LOADS
  let place_$i = lid + $iu * THREADS;
  let row_$i = row0 + place_$i / (BLOCK_COLUMNS / UNIT);
  let column_$i = column0 + place_$i % (BLOCK_COLUMNS / UNIT) * UNIT;
  let is_inside_$i = row_$i < p.rows && column_$i < p.columns;
  let near_$i = select(0u, column_$i, is_inside_$i);
  let unit_$i = fetch_b(min(row_$i, p.rows - 1u) * p.columns + near_$i, p.columns - near_$i);
#end
#unroll i LOADS
  {
    let ready = ready_b(unit_$i);
    let at = (row_$i - row0) * LINE + column_$i - column0;
#unroll q QUADS
    {
      let four = select(vec4<f32>(0.0), four_b(ready, 4u * $qu), is_inside_$i);
#unroll e 4
      block[at + 4u * $qu + $eu] = four[$e];
#end
    }
#end
  }
#end
  workgroupBarrier();

  // An invocation has 16 consecutive elements along K, at one place along I.
  let i = lid % 32u;
  let part = lid / 32u;
#if ACROSS
  let first = part * 16u * LINE + i;
  let k_block = wg.y;
  let column = column0 + i;
#unroll w 4
#unroll e 4
  let value_$w_$e = block[first + ($wu * 4u + $eu) * LINE];
#end
#end
#else
  let first = i * LINE + part * 16u;
  let k_block = wg.x;
  let column = row0 + i;
#unroll w 4
#unroll e 4
  let value_$w_$e = block[first + $wu * 4u + $eu];
#end
#end
#endif
  var peak = 0u;  // compared as integers, where NaN is largest
#unroll w 4
#unroll e 4
  peak = max(peak, bitcast<u32>(value_$w_$e) & 0x7fffffffu);
#end
#end
  peaks[lid] = peak;
  workgroupBarrier();
  peak = max(max(peaks[i], peaks[32u + i]), max(peaks[64u + i], peaks[96u + i]));
  let largest = bitcast<f32>(peak);
  // Below about 1e-36 the quotient overflows float32; such a block becomes zeros.
  let inverse = select(0.0, 127.0 / largest, peak > 0x04000000u);
  // The low bits of 1.5 * 2^23 + x are those of the integer nearest to x.
#unroll w 4
  {
    let bits = bitcast<vec4<u32>>(vec4<f32>(12582912.0) + inverse * vec4<f32>(
#unroll e 4
      value_$w_$e,
#end
    )) & vec4<u32>(255u);
    made_words[(k_block * 16u + part * 4u + $wu) * p.padded + column] = bits.x | (bits.y << 8u) | (bits.z << 16u) | (bits.w << 24u);
  }
#end
  if (part == 0u) { made_scales[k_block * p.padded + column] = largest / 127.0; }
}
