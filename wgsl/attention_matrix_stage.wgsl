// Part of attention_matrix_dkv.wgsl: what attention_matrix_fetch.wgsl has read, into workgroup memory.
#unroll n LOADS_COLUMNS
    q_tile[(at_$n / W4) * Q_LD + at_$n % W4] = q_next_$n;
    q_tile[(BN + at_$n / W4) * Q_LD + at_$n % W4] = dy_next_$n;
#end
    if (lid < BN) {
      low_tile[lid] = low;
      stat_tile[lid] = stat;
    }
