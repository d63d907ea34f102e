// Part of attention_matrix*.wgsl: rows of one head of $x, from $first on, into `tile` from row $place on; beyond $end the last
// row again.
#unroll n $loads
  {
    let at = lid + $nu * THREADS;
    let token = min($first + at / W4, $end - 1u);
    tile[($place + at / W4) * TILE_LD + at % W4] = $x[((b * p.$tokens + token) * p.$heads + $head) * W4 + at % W4];
  }
#end
