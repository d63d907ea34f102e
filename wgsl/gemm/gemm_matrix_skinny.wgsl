// GEMM with a side of a LoRA's rank, on tensor cores: X f16 [rows, columns], S f32 of that rank, f32 sums and result.
//
//   ALONG_ROWS false: C[rows, rank] = alpha * X S,    the reduction along X's columns  (x A^T, dy B)
//   ALONG_ROWS true:  C[rank, columns] = alpha * S X, the reduction along X's rows     (du^T x, dy^T u; + C where
//   ACCUMULATE)
//
// Ranks of a stack of weights (PARTS) and first_rank are as in gemm_skinny.wgsl. S is read as [reduction, rank]
// (RANK_INNER) or [rank, reduction]; C is written transposed where C_TRANS. S is split into two pieces of f16, the
// rounded value and the remainder, so that no precision is lost.
//
// EXPERTS: rows belong to experts, start[expert] to start[expert + 1]. With GATHER row i of X is row order[i] / p.column_1.
// Without ALONG_ROWS, S has p.split_size ranks (RANK_INNER: elements) for each of p.column_2 experts, and tiles of x are
// as in the part tile_of_expert. With it, C has a result for each expert: y = experts, z = p.column_2 shares of each
// expert's rows.
//
// Dispatch: x = rows (or columns where ALONG_ROWS) / TILE; y = parts; z = shares of the reduction, of k_per_split each,
// whose sums go to C [shares, split_size] for gemm_reduce.wgsl (SPLIT).
// A workgroup of SGS subgroups of LANES invocations takes TILE rows or columns of X and walks the reduction in blocks
// of KB. GROUPS subgroups, with 16 CF rows or columns each, take one share of a block's steps, the next GROUPS the next
// share; their sums are added in workgroup memory. While a block is multiplied, the next AHEAD blocks are in registers
// or being loaded.
// Needs: subgroups of LANES; rows and columns of X multiples of 16, with EXPERTS columns a multiple of 8, and for
// ALONG_ROWS ranks of 4; TILE KB a multiple of 8 invocations.
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm_skinny.inc.wgsl" parameters
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#if VEC_S
@group(0) @binding(2) var<storage, read> s: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> s: array<f32>;
#endif
@group(0) @binding(3) var<storage, read_write> c: array<f32>;
#if EXPERTS
@group(0) @binding(4) var<storage, read> start: array<i32>;
#if GATHER
@group(0) @binding(5) var<storage, read> order: array<i32>;
#endif
#endif

#include "common.inc.wgsl" optimization_barrier
#include "common.inc.wgsl" matrix_pieces

const THREADS: u32 = $LANESu * SGS;
const TILE: u32 = 16u * CF * GROUPS;
const TILE_M: u32 = TILE;
// Blocks have the layout of X and S, in eights; rows of an odd number of eights start in different banks. A row of the
// pieces has one rank or, BY_STEPS (ranks are contiguous in S and read four at a time), one step of the reduction.
#if BY_STEPS
const S_WIDTH: u32 = 2u * RF;
const S_ROWS: u32 = KB;
#else
const S_WIDTH: u32 = KB / 8u;
const S_ROWS: u32 = 16u * RF;
#endif
const S_LD: u32 = S_WIDTH + 1u;
const PIECES: u32 = S_ROWS * S_LD;
#if ALONG_ROWS
const X_WIDTH: u32 = TILE / 8u;
const X_ROWS: u32 = KB;
#else
const X_WIDTH: u32 = KB / 8u;
const X_ROWS: u32 = TILE;
#endif
const X_LD: u32 = X_WIDTH + 1u;

// Fewer bytes let a compute unit run more workgroups: with 27 KB instead of 23 an H200 takes 1.7 times as long.
var<workgroup> pieces: array<Eight, 2u * PIECES>;
var<workgroup> block: array<Eight, X_ROWS * X_LD>;
var<workgroup> strips: array<vec4<f32>, SGS * 16u * 4u>;

#include read

#if EXPERTS
fn row_of_x(i: u32) -> u32 {
#if GATHER
  return u32(order[i]) / p.column_1;
#else
  return i;
#endif
}
#endif

#if LANES == 32
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#else
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32, @builtin(subgroup_id) subgroup_id: u32) {
#endif
#include "common.inc.wgsl" subgroup_index
  let mine = subgroup % GROUPS * (16u * CF);  // rows or columns of the tile
  let share = subgroup / GROUPS * (16u * STEPS);  // of a block's steps
  let ld = 2u * S_LD;  // row stride for cooperative loads, in vec4<f16>
  let ld_x = 2u * X_LD;
  let ld_strip = 4u;
#if EXPERTS
#if ALONG_ROWS
  let first_x = (p.first_tile + wg.x) * TILE;
  let row_end = p.rows;
  let k_first = u32(start[wg.y]);
  let rows = u32(start[wg.y + 1u]) - k_first;
  // A share without rows multiplies one that is another's, and its sums are not taken.
  let k_last = max(k_first + rows, 1u);
  let first_s = 0u;
  let first_c = 0u;
  let of_share = (rows + KB * p.column_2 - 1u) / (KB * p.column_2) * KB;
  let k_begin = min(k_first + wg.z * of_share, k_first + rows);
  let some = k_begin < k_first + rows;
  let k_end = max(min(k_first + rows, k_begin + of_share), 1u);
  let expert_c = wg.y * (p.rank * p.columns);
#else
  let tile = p.first_tile + wg.x;
#include "gemm.inc.wgsl" tile_of_expert experts=p.column_2
  let first_x = m0;
  let row_end = m_end;
  let k_begin = 0u;
  let k_end = p.columns;
  let k_last = p.columns;
  let first_s = expert * p.split_size;
  let first_c = 0u;
  let expert_c = 0u;
#endif
#else
  let first_x = (p.first_tile + wg.x) * TILE;
  let row_end = p.rows;
#include "gemm_skinny.inc.wgsl" range
#if SPLIT
  // In a part with fewer shares than others, some would begin beyond its end: they give zeros.
  let k_begin = min(k_first + wg.z * p.k_per_split, k_last);
  let k_end = min(k_last, k_begin + p.k_per_split);
#else
  let k_begin = k_first;
  let k_end = k_last;
#endif
  let expert_c = 0u;
#endif
  let blocks = (k_end - k_begin + KB - 1u) / KB;
  let rounds = (blocks + AHEAD - 1u) / AHEAD;
#unroll i RF
#unroll j CF
  var acc_$i_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll a AHEAD
#unroll e X_LOADS
  var ahead_x_$a_$e: vec4<u32>;
#end
#unroll e S_LOADS
  var ahead_low_$a_$e: vec4<f32>;
  var ahead_high_$a_$e: vec4<f32>;
#end
  {
    let k0 = k_begin + $au * KB;
#include fetch
#include keep
  }
#end
  // The last round is stored after the loop: if loads were used only in the next iteration, NVIDIA's compiler would
  // move them there (bench/notes/rejected-tensor-cores.md).
  for (var n = 1u; n < rounds; n++) {
#unroll a AHEAD
    {
#include stage
      workgroupBarrier();
      let k0 = k_begin + (n * AHEAD + $au) * KB;
#include fetch
#include multiply
      workgroupBarrier();
#include keep
    }
#end
  }
#unroll a AHEAD
#include stage
  workgroupBarrier();
#include multiply
  workgroupBarrier();
#end

#unroll i RF
#unroll j CF
  {
    let strip = subgroup * 64u;
    coopStoreT(acc_$i_$j, &strips[strip], ld_strip);
    workgroupBarrier();
    for (var e = lid; e < 256u * GROUPS; e += THREADS) {
#if EXPERTS
#if C_TRANS
      let at = e % 16u * 16u + e / 16u % 16u;  // neighboring invocations store neighboring ranks
#else
      let at = e % 256u;
#endif
#else
      let at = e % 256u;
#endif
      let group = e / 256u;
      var sum = 0.0;
      for (var other = group; other < SGS; other += GROUPS) { sum += strips[other * 64u + at / 4u][at % 4u]; }
#if ALONG_ROWS
      let r = 16u * $iu + at / 16u;
      let i = first_x + 16u * (group * CF + $ju) + at % 16u;
      let inside = r < p.rank && i < p.columns;
#else
      let r = 16u * $iu + at % 16u;
      let i = first_x + 16u * (group * CF + $ju) + at / 16u;
      let inside = r < p.rank && i < row_end;
#endif
#if EXPERTS
#if ALONG_ROWS
      sum = select(0.0, sum, some);
#endif
#endif
#if SPLIT
      if (inside) { c[wg.z * p.split_size + expert_c + place(i, first_c + r)] = sum; }
#else
      let to = expert_c + place(i, first_c + r);
#if ACCUMULATE
      if (inside) { c[to] += sum * p.alpha; }
#else
      if (inside) { c[to] = sum * p.alpha; }
#endif
#endif
    }
    workgroupBarrier();
  }
#end
#end
}

#part read
// Part of gemm_matrix_skinny.wgsl: four numbers of S, zeros beyond its ranks and beyond k_last.
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
#endpart

#part fetch
// Part of gemm_matrix_skinny.wgsl: load the block of X and S from k0 on into registers, without a branch, so that all
// loads overlap. Beyond the end, the last elements of X are repeated, and multiplied by zeros.
#unroll e X_LOADS
    let x_e_$e = lid + THREADS * $eu;
#if ALONG_ROWS
#if EXPERTS
    let x_k_$e = row_of_x(min(k0 + x_e_$e / X_WIDTH, k_last - 1u));
#else
    let x_k_$e = min(k0 + x_e_$e / X_WIDTH, k_last - 1u);
#endif
    let next_x_$e = x[(x_k_$e * p.columns + min(first_x + 8u * (x_e_$e % X_WIDTH), p.columns - 8u)) / 8u];
#else
    let x_k_$e = min(k0 + 8u * (x_e_$e % X_WIDTH), k_last - 8u);
#if EXPERTS
    let x_row_$e = row_of_x(min(first_x + x_e_$e / X_WIDTH, row_end - 1u));
#else
    let x_row_$e = min(first_x + x_e_$e / X_WIDTH, row_end - 1u);
#endif
    let next_x_$e = x[(x_row_$e * p.columns + x_k_$e) / 8u];
#endif
#end
#unroll e S_LOADS
    let s_row_$e = (lid + THREADS * $eu) / S_WIDTH;
    let s_eight_$e = (lid + THREADS * $eu) % S_WIDTH;
#if BY_STEPS
    let next_low_$e = four_s(8u * s_eight_$e, k0 + s_row_$e, k_end, first_s);
    let next_high_$e = four_s(8u * s_eight_$e + 4u, k0 + s_row_$e, k_end, first_s);
#else
    let next_low_$e = four_s(s_row_$e, k0 + 8u * s_eight_$e, k_end, first_s);
    let next_high_$e = four_s(s_row_$e, k0 + 8u * s_eight_$e + 4u, k_end, first_s);
#endif
#end
#endpart

#part keep
// Part of gemm_matrix_skinny.wgsl: keep what the part fetch has loaded in the registers of set $a.
#unroll e X_LOADS
    ahead_x_$a_$e = next_x_$e;
#end
#unroll e S_LOADS
    ahead_low_$a_$e = next_low_$e;
    ahead_high_$a_$e = next_high_$e;
#end
#endpart

#part stage
// Part of gemm_matrix_skinny.wgsl: store the block in the registers of set $a to workgroup memory.
#unroll e X_LOADS
    {
      let e = lid + THREADS * $eu;
      let to = e / X_WIDTH * X_LD + e % X_WIDTH;
      let words = ahead_x_$a_$e;
      let x_low = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
      let x_high = vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w));
      block[to] = Eight(vec4<f16>(x_low), vec4<f16>(x_high));
    }
#end
#unroll e S_LOADS
    {
      let e = lid + THREADS * $eu;
      let to = e / S_WIDTH * S_LD + e % S_WIDTH;
      let rest_to = to + PIECES;
      let low = ahead_low_$a_$e;
      let high = ahead_high_$a_$e;
      let held_low = held(low);
      let held_high = held(high);
      if (e < S_ROWS * S_WIDTH) {
        pieces[to] = Eight(vec4<f16>(held_low), vec4<f16>(held_high));
        pieces[rest_to] = Eight(vec4<f16>(low - held_low), vec4<f16>(high - held_high));
      }
    }
#end
#endpart

#part multiply
// Part of gemm_matrix_skinny.wgsl: acc += the subgroup's share of the block in workgroup memory.
#unroll k STEPS
    {
      let step = share + 16u * $ku;
#unroll j CF
#if ALONG_ROWS
      let x_at_$j = step * X_LD + (mine + 16u * $ju) / 8u;
      let x_$j = coopLoadT<coop_mat16x16<f16, B>>(&block[x_at_$j].low, ld_x);
#else
      let x_at_$j = (mine + 16u * $ju) * X_LD + step / 8u;
      let x_$j = coopLoadT<coop_mat16x16<f16, A>>(&block[x_at_$j].low, ld_x);
#endif
#end
#unroll i RF
#unroll piece 2
      {
#if BY_STEPS
        let s_at_$i = $pieceu * PIECES + step * S_LD + 2u * $iu;
#else
        let s_at_$i = $pieceu * PIECES + 16u * $iu * S_LD + step / 8u;
#endif
#if ALONG_ROWS
#if BY_STEPS
        let s_a = coopLoad<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#else
        let s_a = coopLoadT<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
        acc_$i_$j = coopMultiplyAdd(s_a, x_$j, acc_$i_$j);
#end
#else
#if BY_STEPS
        let s_b = coopLoadT<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#else
        let s_b = coopLoad<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
        acc_$i_$j = coopMultiplyAdd(x_$j, s_b, acc_$i_$j);
#end
#endif
      }
#end
#end
    }
#end
#endpart
