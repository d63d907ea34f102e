// Part of attention_matrix_dq.wgsl and attention_matrix_dkv.wgsl: BN rows of one head of $x and of $y, from $first on, into
// registers; beyond the end the last row again.
#unroll n LOADS_COLUMNS
    let at_$n = (lid + $nu * THREADS) % (BN * W8);
    let source_$n = ((b * p.queries + min($first + at_$n / W8, p.queries - 1u)) * p.$heads + $head) * W8 + at_$n % W8;
    let $x_next_$n = $x[source_$n];
    let $y_next_$n = $y[source_$n];
#end
