// The GEMM of gemm.wgsl for dense operands, without workgroup memory. Each invocation owns 4 TM4 consecutive rows and 4
// TN4 consecutive columns, and reads its rows of A and columns of B from the arrays, four steps of K at a time. For
// devices whose barriers cost more than cached reads: a software driver switches between invocations at a barrier.
// Operands, result and epilogue are those of gemm.wgsl. Dispatch: x = tiles of N, y = tiles of M workgroups, z = batch.

#include "gemm.inc.wgsl" bindings
#include "gemm.inc.wgsl" dense x=a binding=1 kind=A_KIND vec=VEC_A
#include "gemm.inc.wgsl" dense x=b binding=2 kind=B_KIND vec=VEC_B

const TX: u32 = TILE_N / 4u / TN4;  // threads along N
const THREADS: u32 = TX * (TILE_M / 4u / TM4);

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row0 = (p.first_y + wg.y) * TILE_M + (lid / TX) * (4u * TM4);
  let col0 = (p.first_x + wg.x) * TILE_N + (lid % TX) * (4u * TN4);
  if (row0 >= p.m || col0 >= p.n) { return; }
  let a_base = wg.z * p.m * p.k;
  let b_base = wg.z * p.k * p.n;
  let c_base = wg.z * p.m * p.ldc;
  let last_row = p.m - 1u;
  let last_col = p.n - 1u;
#unroll i TM4
#unroll r 4
#unroll j TN4
  var acc_$i_$r_$j = vec4<f32>(0.0);
#end
#end
#end
  for (var k = 0u; k < p.k; k += 4u) {
#if TRANS_A
#unroll s 4
#unroll i TM4
    var at_$s_$i = vec4<f32>(0.0);
    if (k + $su < p.k && row0 + 4u * $iu < p.m) {
      at_$s_$i = fetch_a(a_base + (k + $su) * p.lda + p.a_col + row0 + 4u * $iu, p.m - row0 - 4u * $iu);
    }
#end
#end
#unroll i TM4
#unroll r 4
    let a_$i_$r = vec4<f32>(at_0_$i[$r], at_1_$i[$r], at_2_$i[$r], at_3_$i[$r]);
#end
#end
#else
#unroll i TM4
#unroll r 4
    let a_$i_$r = fetch_a(a_base + min(row0 + 4u * $iu + $ru, last_row) * p.lda + p.a_col + k, p.k - k);
#end
#end
#endif
#if TRANS_B
#unroll j TN4
#unroll e 4
    let bt_$j_$e = fetch_b(b_base + min(col0 + 4u * $ju + $eu, last_col) * p.k + k, p.k - k);
#end
#end
#unroll s 4
#unroll j TN4
    let b_$s_$j = vec4<f32>(bt_$j_0[$s], bt_$j_1[$s], bt_$j_2[$s], bt_$j_3[$s]);
#end
#end
#else
#unroll s 4
#unroll j TN4
    var b_$s_$j = vec4<f32>(0.0);
    if (k + $su < p.k && col0 + 4u * $ju < p.n) {
      b_$s_$j = fetch_b(b_base + (k + $su) * p.n + col0 + 4u * $ju, p.n - col0 - 4u * $ju);
    }
#end
#end
#endif
#unroll i TM4
#unroll r 4
#unroll j TN4
#unroll s 4
    acc_$i_$r_$j = fma(vec4<f32>(a_$i_$r[$s]), b_$s_$j, acc_$i_$r_$j);
#end
#end
#end
#end
  }
#if HAS_LOWRANK
  for (var s = 0u; s < p.rank; s++) {
#unroll j TN4
#if TRANS_B
    let at_$j = (p.c_col + col0 + 4u * $ju) * p.rank + s;
    let top_$j = (p.c_col + last_col) * p.rank + s;
    let v_$j = vec4<f32>(v[min(at_$j, top_$j)], v[min(at_$j + p.rank, top_$j)],
                         v[min(at_$j + 2u * p.rank, top_$j)], v[min(at_$j + 3u * p.rank, top_$j)]);
#else
    let at_$j = s * p.n + col0 + 4u * $ju;
    let top_$j = s * p.n + last_col;
    let v_$j = vec4<f32>(v[min(at_$j, top_$j)], v[min(at_$j + 1u, top_$j)], v[min(at_$j + 2u, top_$j)], v[min(at_$j + 3u, top_$j)]);
#endif
#end
#unroll i TM4
#unroll r 4
    let u_$i_$r = u[min(row0 + 4u * $iu + $ru, last_row) * p.ld_u + part_of(col0) * p.rank + s] / p.alpha;
#unroll j TN4
    acc_$i_$r_$j = fma(vec4<f32>(u_$i_$r), v_$j, acc_$i_$r_$j);
#end
#end
#end
  }
#endif
#unroll i TM4
#unroll r 4
  if (row0 + 4u * $iu + $ru < p.m) {
#unroll j TN4
    store(row0 + 4u * $iu + $ru, col0 + 4u * $ju, c_base, acc_$i_$r_$j);
#end
  }
#end
#end
}

#include "gemm.inc.wgsl" store
