// Part of gemm_matrix.wgsl: what gemm_matrix_fetch.wgsl has read, into workgroup memory, as f16, with zeros beyond the end of K.
#unroll i LOADS_A
  {
    let to = a_row_$i * A_LD + a_col_$i / 4u;
#if K_EDGE
    let inside = k0 + select(a_col_$i, a_row_$i, TRANS_A) < k_last;
    a_tile[to] = select(vec4<f16>(), half_a(next_a_$i_lo), inside);
    a_tile[to + 1u] = select(vec4<f16>(), half_a(next_a_$i_hi), inside);
#else
    a_tile[to] = half_a(next_a_$i_lo);
    a_tile[to + 1u] = half_a(next_a_$i_hi);
#endif
  }
#end
#unroll i LOADS_B
  {
    let to = b_row_$i * B_LD + b_col_$i / 4u;
#if B_KIND == 3
#if NESTED
    // Not a fused multiply-add: see nf4_dequantize.wgsl.
    let scale = bitcast<f32>(bitcast<u32>(outer[next_absmax_$i] * next_nested_$i) | p.zero) + offset;
#else
    let scale = next_absmax_$i;
#endif
    let lo = decode4(next_b_$i, scale);
    let hi = decode4(next_b_$i >> 16u, scale);
#else
    let lo = half_b(next_b_$i_lo);
    let hi = half_b(next_b_$i_hi);
#endif
#if K_EDGE
    let inside = k0 + select(b_row_$i, b_col_$i, TRANS_B) < k_last;
    b_tile[to] = select(vec4<f16>(), lo, inside);
    b_tile[to + 1u] = select(vec4<f16>(), hi, inside);
#else
    b_tile[to] = lo;
    b_tile[to + 1u] = hi;
#endif
  }
#end
