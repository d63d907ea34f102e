// Products with a side of a LoRA's rank, on matrix units: X f16 [rows, columns], S f32 of that rank, sums and result f32.
//
//   ALONG_ROWS false: C[rows, rank] = alpha * X S,    the reduction along X's columns  (x A^T, dy B)
//   ALONG_ROWS true:  C[rank, columns] = alpha * S X, the reduction along X's rows     (du^T x, dy^T u; + C where ACCUMULATE)
//
// Ranks of a stack of weights (PARTS) and first_rank are as in gemm_skinny.wgsl. S is read as [reduction, rank] (RANK_INNER)
// or [rank, reduction]; C is written transposed where C_TRANS. X is read once: straight from storage as a right operand,
// 16 bytes at a time through workgroup memory as a left one (a sixth faster there). S goes as f16 in two pieces, what f16
// holds of it and what it leaves out, so that nothing of it is lost beside float32.
//
// Dispatch: rows, or columns where ALONG_ROWS, / (16 CF) workgroups. A workgroup of SGS subgroups of 32 invocations deals the
// reduction out in blocks of KB; their sums meet in workgroup memory.
// Wants: subgroups of 32; rows and columns of X multiples of 16.
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm_skinny_parameters.wgsl"
#if ALONG_ROWS
@group(0) @binding(1) var<storage, read> x: array<vec4<f16>>;
#else
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#endif
#if VEC_S
@group(0) @binding(2) var<storage, read> s: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> s: array<f32>;
#endif
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

#include "optimisation_barrier.wgsl"
#include "gemm_matrix_pieces.wgsl"

const THREADS: u32 = 32u * SGS;
// Rows of an odd number of eights start in different banks. A row of the pieces is of one rank, or where ranks lie side by side in S and are read four at a time of one step of the
// reduction.
#if BY_STEPS
const S_WIDTH: u32 = 2u * RF;
const S_ROWS: u32 = KB;
#else
const S_WIDTH: u32 = KB / 8u;
const S_ROWS: u32 = 16u * RF;
#endif
const S_LD: u32 = S_WIDTH + 1u;
const PIECES: u32 = S_ROWS * S_LD;  // of a subgroup's block
const X_WIDTH: u32 = KB / 8u;
const X_LD: u32 = X_WIDTH + 1u;

var<workgroup> pieces: array<Eight, SGS * 2u * PIECES>;
#if !ALONG_ROWS
var<workgroup> block: array<Eight, SGS * 16u * CF * X_LD>;
#endif
var<workgroup> strips: array<vec4<f32>, SGS * 16u * 4u>;

#if VEC_S
#if BY_STEPS
// Ranks r to r + 3 of step k.
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
  let four = s[(min(k, k_last - 1u) * p.ld_s + first_s + min(r, (p.rank - 1u) / 4u * 4u)) / 4u];
  return select(vec4<f32>(), four, vec4<bool>(k < k_last) & (vec4<u32>(r, r + 1u, r + 2u, r + 3u) < vec4<u32>(p.rank)));
}
#else
// Steps k to k + 3 of rank r.
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
  let four = s[((first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u)) / 4u];
  return select(vec4<f32>(), four, r < p.rank && k < k_last);
}
#endif
#else
fn four_s(r: u32, k: u32, k_last: u32, first_s: u32) -> vec4<f32> {
#if RANK_INNER
  let first = min(k, k_last - 4u) * p.ld_s + first_s + min(r, p.rank - 1u);
  let step = p.ld_s;
#else
  let first = (first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u);
  let step = 1u;
#endif
  let four = vec4<f32>(s[first], s[first + step], s[first + 2u * step], s[first + 3u * step]);
  return select(vec4<f32>(), four, r < p.rank && k < k_last);
}
#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = lid % 32u;
  let subgroup = lid / 32u;
  let mine = subgroup * 2u * PIECES;
  let ld = 2u * S_LD;  // as cooperative matrices take it: in vec4<f16>
  let ld_strip = 4u;
#if ALONG_ROWS
  let ld_x = p.columns / 4u;
#else
  let my_block = subgroup * 16u * CF * X_LD;
  let ld_x = 2u * X_LD;
#endif
  let first_x = wg.x * 16u * CF;
#include "gemm_skinny_range.wgsl"
  let blocks = (k_last - k_first + KB * SGS - 1u) / (KB * SGS);
#unroll i RF
#unroll j CF
  var acc_$i_$j = coop_mat16x16<f32, C>();
#end
#end
  for (var n = 0u; n < blocks; n++) {
    let k0 = k_first + (n * SGS + subgroup) * KB;
    // Everything is read before anything is written, so that all reads are under way together. Beyond the end the last
    // block of X is read again, and multiplied by zeros.
#if ALONG_ROWS
#unroll k STEPS
#unroll j CF
    let x_at_$k_$j = min(k0 + 16u * $ku, k_last - 16u) * ld_x + min(first_x + 16u * $ju, p.columns - 16u) / 4u;
    let x_$k_$j = coopLoadT<coop_mat16x16<f16, B>>(&x[x_at_$k_$j], ld_x);
#end
#end
#else
#unroll e X_LOADS
    let x_row_$e = (lane + 32u * $eu) / X_WIDTH;
    let x_eight_$e = (lane + 32u * $eu) % X_WIDTH;
    let x_words_$e = x[(min(first_x + x_row_$e, p.rows - 1u) * p.columns + min(k0 + 8u * x_eight_$e, k_last - 8u)) / 8u];
#end
#endif
#unroll e S_LOADS
    let s_row_$e = (lane + 32u * $eu) / S_WIDTH;
    let s_eight_$e = (lane + 32u * $eu) % S_WIDTH;
#if BY_STEPS
    let s_low_$e = four_s(8u * s_eight_$e, k0 + s_row_$e, k_last, first_s);
    let s_high_$e = four_s(8u * s_eight_$e + 4u, k0 + s_row_$e, k_last, first_s);
#else
    let s_low_$e = four_s(s_row_$e, k0 + 8u * s_eight_$e, k_last, first_s);
    let s_high_$e = four_s(s_row_$e, k0 + 8u * s_eight_$e + 4u, k_last, first_s);
#endif
#end
#if !ALONG_ROWS
#unroll e X_LOADS
    let x_to_$e = my_block + x_row_$e * X_LD + x_eight_$e;
    let x_low_$e = vec4<f32>(unpack2x16float(x_words_$e.x), unpack2x16float(x_words_$e.y));
    let x_high_$e = vec4<f32>(unpack2x16float(x_words_$e.z), unpack2x16float(x_words_$e.w));
    block[x_to_$e] = Eight(vec4<f16>(x_low_$e), vec4<f16>(x_high_$e));
#end
#endif
#unroll e S_LOADS
    let s_to_$e = mine + s_row_$e * S_LD + s_eight_$e;
    let held_low_$e = held(s_low_$e);
    let held_high_$e = held(s_high_$e);
    pieces[s_to_$e] = Eight(vec4<f16>(held_low_$e), vec4<f16>(held_high_$e));
    let rest_to_$e = s_to_$e + PIECES;
    pieces[rest_to_$e] = Eight(vec4<f16>(s_low_$e - held_low_$e), vec4<f16>(s_high_$e - held_high_$e));
#end
    workgroupBarrier();
#unroll k STEPS
#if !ALONG_ROWS
#unroll j CF
    let x_at_$k_$j = my_block + 16u * $ju * X_LD + 2u * $ku;
    let x_$k_$j = coopLoadT<coop_mat16x16<f16, A>>(&block[x_at_$k_$j].low, ld_x);
#end
#endif
#unroll i RF
#unroll piece 2
    {
#if BY_STEPS
      let s_at_$i = mine + $pieceu * PIECES + 16u * $ku * S_LD + 2u * $iu;
#else
      let s_at_$i = mine + $pieceu * PIECES + 16u * $iu * S_LD + 2u * $ku;
#endif
#if ALONG_ROWS
#if BY_STEPS
      let s_a = coopLoad<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#else
      let s_a = coopLoadT<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
      acc_$i_$j = coopMultiplyAdd(s_a, x_$k_$j, acc_$i_$j);
#end
#else
#if BY_STEPS
      let s_b = coopLoadT<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#else
      let s_b = coopLoad<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
      acc_$i_$j = coopMultiplyAdd(x_$k_$j, s_b, acc_$i_$j);
#end
#endif
    }
#end
#end
#end
    workgroupBarrier();
  }

#unroll i RF
#unroll j CF
  {
    let strip = subgroup * 64u;
    coopStoreT(acc_$i_$j, &strips[strip], ld_strip);
    workgroupBarrier();
    for (var at = lid; at < 256u; at += THREADS) {
      var sum = 0.0;
      for (var other = 0u; other < SGS; other++) { sum += strips[other * 64u + at / 4u][at % 4u]; }
#if ALONG_ROWS
      let r = 16u * $iu + at / 16u;
      let i = first_x + 16u * $ju + at % 16u;
      let inside = r < p.rank && i < p.columns;
#else
      let r = 16u * $iu + at % 16u;
      let i = first_x + 16u * $ju + at / 16u;
      let inside = r < p.rank && i < p.rows;
#endif
      let to = place(i, first_c + r);
#if ACCUMULATE
      if (inside) { c[to] += sum * p.alpha; }
#else
      if (inside) { c[to] = sum * p.alpha; }
#endif
    }
    workgroupBarrier();
  }
#end
#end
}
