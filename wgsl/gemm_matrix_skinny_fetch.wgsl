// Part of gemm_matrix_skinny.wgsl: the block of X and S from k0 on, into registers, without a branch, so that all reads are under
// way together. Beyond the end the last of X is read again, and multiplied by zeros.
#unroll e X_LOADS
    let x_e_$e = lid + THREADS * $eu;
#if ALONG_ROWS
    let x_k_$e = min(k0 + x_e_$e / X_WIDTH, k_last - 1u);
    let next_x_$e = x[(x_k_$e * p.columns + min(first_x + 8u * (x_e_$e % X_WIDTH), p.columns - 8u)) / 8u];
#else
    let x_k_$e = min(k0 + 8u * (x_e_$e % X_WIDTH), k_last - 8u);
    let next_x_$e = x[(min(first_x + x_e_$e / X_WIDTH, p.rows - 1u) * p.columns + x_k_$e) / 8u];
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
