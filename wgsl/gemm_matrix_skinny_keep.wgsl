// Part of gemm_matrix_skinny.wgsl: what gemm_matrix_skinny_fetch.wgsl has read, into the registers of set $a.
#unroll e X_LOADS
    ahead_x_$a_$e = next_x_$e;
#end
#unroll e S_LOADS
    ahead_low_$a_$e = next_low_$e;
    ahead_high_$a_$e = next_high_$e;
#end
