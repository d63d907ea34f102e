// Part of gemm_matrix.wgsl: a tile of A and B that gemm_matrix_fetch.wgsl has read, and that is in $from_a_0 ... and
// $from_b_0 ..., into workgroup memory, as f16, with zeros beyond the end of K.
#unroll i LOADS_A
#include "gemm_matrix_place.wgsl" x=a eights=1 ld=A_LD inside=a_col_$i,a_row_$i,TRANS_A
#end
#unroll i LOADS_B
#include "gemm_matrix_place.wgsl" x=b eights=EIGHTS_B ld=B_LD inside=b_row_$i,b_col_$i,TRANS_B
#end
