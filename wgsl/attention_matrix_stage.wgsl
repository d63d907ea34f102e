// Part of attention_matrix*.wgsl: what was read into registers of the next rows of $x and of $y, into `tile`.
#unroll n LOADS_COLUMNS
    tile[(at_$n / W4) * TILE_LD + at_$n % W4] = $x_next_$n;
    tile[(BN + at_$n / W4) * TILE_LD + at_$n % W4] = $y_next_$n;
#end
