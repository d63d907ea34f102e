// Part of gemm.wgsl and gemm_int8.wgsl: the sums of an invocation, by row and block of columns.
  var acc: array<array<vec4<f32>, TN4>, ACC_ROWS>;
#unroll i ACC_ROWS
#unroll j TN4
  acc[$i][$j] = vec4<f32>(0.0);
#end
#end
