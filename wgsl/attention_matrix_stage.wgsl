// Part of attention_matrix*.wgsl: what was read into registers of the next rows of $x and of $y, into `tile`.
#unroll n LOADS_COLUMNS
    let $x_to_$n = (at_$n / W8) * TILE_LD + at_$n % W8;
    tile[$x_to_$n] = Eight(four_of($x_next_$n.xy), four_of($x_next_$n.zw));
    let $y_to_$n = $x_to_$n + BN * TILE_LD;
    tile[$y_to_$n] = Eight(four_of($y_next_$n.xy), four_of($y_next_$n.zw));
#end
