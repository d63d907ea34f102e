// Products with a side of a LoRA's rank, on matrix units: X f16 [rows, columns], S f32 of that rank, sums and result f32.
//
//   ALONG_ROWS false: C[rows, rank] = alpha * X S,    the reduction along X's columns  (x A^T, dy B)
//   ALONG_ROWS true:  C[rank, columns] = alpha * S X, the reduction along X's rows     (du^T x, dy^T u; + C where ACCUMULATE)
//
// Ranks of a stack of weights (PARTS) and first_rank are as in gemm_skinny.wgsl. S is read as [reduction, rank] (RANK_INNER) or [rank, reduction]; C is written transposed where C_TRANS. X is read
// straight from storage, once: these products are bound by that. S goes as f16 in two pieces, what f16 holds of it and what
// it leaves out, so that nothing of it is lost beside float32.
//
// Dispatch: ALONG_ROWS false: rows / 16 workgroups; true: columns / (16 CF). A workgroup of SGS subgroups of 32 invocations deals
// the reduction out in blocks of KB; their sums meet in workgroup memory.
// Wants: subgroups of 32; rows and columns of X multiples of 16.
enable f16;
enable wgpu_cooperative_matrix;

#include "gemm_skinny_parameters.wgsl"
@group(0) @binding(1) var<storage, read> x: array<vec4<f16>>;
#if VEC_S
@group(0) @binding(2) var<storage, read> s: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> s: array<f32>;
#endif
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

#include "optimisation_barrier.wgsl"

const THREADS: u32 = 32u * SGS;
const KB4: u32 = KB / 4u;
// Of a row of pieces, in vec4: a row is of one rank, or where ranks lie side by side in S and are read four at a time of one
// step of the reduction.
#if BY_STEPS
const LD: u32 = 4u * RF + 2u * ((RF + 1u) % 2u);
const PIECES: u32 = KB * LD;  // vec4 of one piece of a subgroup's block
#else
const LD: u32 = KB4 + 2u;
const PIECES: u32 = 16u * RF * LD;
#endif

var<workgroup> pieces: array<vec4<f16>, SGS * 2u * PIECES>;
var<workgroup> strips: array<vec4<f32>, SGS * 16u * 4u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let lane = lid % 32u;
  let subgroup = lid / 32u;
  let mine = subgroup * 2u * PIECES;
  let ld = LD;
  let ld_x = p.columns / 4u;
  let ld_strip = 4u;
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
    // Beyond the end the last block is read again, and multiplied by zeros.
#unroll k STEPS
#unroll j CF
#if ALONG_ROWS
    let x_at_$k_$j = min(k0 + 16u * $ku, k_last - 16u) * ld_x + min(first_x + 16u * $ju, p.columns - 16u) / 4u;
    let x_$k_$j = coopLoadT<coop_mat16x16<f16, B>>(&x[x_at_$k_$j], ld_x);
#else
    let x_at_$k_$j = min(first_x + 16u * $ju, p.rows - 16u) * ld_x + min(k0 + 16u * $ku, k_last - 16u) / 4u;
    let x_$k_$j = coopLoadT<coop_mat16x16<f16, A>>(&x[x_at_$k_$j], ld_x);
#endif
#end
#end
#unroll e LOADS
    {
      let at = lane + 32u * $eu;
#if VEC_S
#if BY_STEPS
      let r = 4u * (at % (4u * RF));
      let k = k0 + at / (4u * RF);
      let four = s[(min(k, k_last - 1u) * p.ld_s + first_s + min(r, (p.rank - 1u) / 4u * 4u)) / 4u];
      let value = select(vec4<f32>(), four, vec4<bool>(k < k_last) & (vec4<u32>(r, r + 1u, r + 2u, r + 3u) < vec4<u32>(p.rank)));
      let to = mine + (k - k0) * LD + r / 4u;
#else
      let r = at / KB4;
      let k = k0 + 4u * (at % KB4);
      let four = s[((first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u)) / 4u];
      let value = select(vec4<f32>(), four, r < p.rank && k < k_last);
      let to = mine + r * LD + (k - k0) / 4u;
#endif
#else
#if RANK_INNER
      let r = at % (16u * RF);
      let k = k0 + 4u * (at / (16u * RF));
      let first = min(k, k_last - 4u) * p.ld_s + first_s + min(r, p.rank - 1u);
      let step = p.ld_s;
#else
      let r = at / KB4;
      let k = k0 + 4u * (at % KB4);
      let first = (first_s + min(r, p.rank - 1u)) * p.ld_s + min(k, k_last - 4u);
      let step = 1u;
#endif
      let value = select(vec4<f32>(), vec4<f32>(s[first], s[first + step], s[first + 2u * step], s[first + 3u * step]),
                         r < p.rank && k < k_last);
      let to = mine + r * LD + (k - k0) / 4u;
#endif
      // Without the barrier f32(f16(x)) is taken for x: see gemm_matrix.wgsl.
      let low = unpack2x16float(optimisation_barrier(pack2x16float(value.xy)));
      let high = unpack2x16float(optimisation_barrier(pack2x16float(value.zw)));
      let held = vec4<f32>(low, high);
      pieces[to] = vec4<f16>(held);
      pieces[to + PIECES] = vec4<f16>(value - held);
    }
#end
    workgroupBarrier();
#unroll k STEPS
#unroll i RF
#unroll piece 2
    {
#if BY_STEPS
      let s_at = mine + $pieceu * PIECES + 16u * $ku * LD + 4u * $iu;
#else
      let s_at = mine + $pieceu * PIECES + 16u * $iu * LD + 4u * $ku;
#endif
#if ALONG_ROWS
#if BY_STEPS
      let s_a = coopLoad<coop_mat16x16<f16, A>>(&pieces[s_at], ld);
#else
      let s_a = coopLoadT<coop_mat16x16<f16, A>>(&pieces[s_at], ld);
#endif
#unroll j CF
      acc_$i_$j = coopMultiplyAdd(s_a, x_$k_$j, acc_$i_$j);
#end
#else
#if BY_STEPS
      let s_b = coopLoadT<coop_mat16x16<f16, B>>(&pieces[s_at], ld);
#else
      let s_b = coopLoad<coop_mat16x16<f16, B>>(&pieces[s_at], ld);
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
