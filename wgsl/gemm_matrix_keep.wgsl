// Part of gemm_matrix.wgsl: what gemm_matrix_fetch.wgsl has read stays in registers until the loop's next pass.
#unroll i LOADS_A
    ahead_a_$i = next_a_$i;
#end
#unroll i LOADS_B
    ahead_b_$i = next_b_$i;
#end
