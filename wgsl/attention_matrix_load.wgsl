// Part of attention_matrix*.wgsl: rows of one head of $x, from $first on, into `tile` from row $place on; beyond $end the last
// row again.
#unroll n $loads
  {
    let at = (lid + $nu * THREADS) % (BN * W8);
    let token = min($first + at / W8, $end - 1u);
    let words = $x[((b * p.$tokens + token) * p.$heads + $head) * W8 + at % W8];
    let to = ($place + at / W8) * TILE_LD + at % W8;
    tile[to] = Eight(four_of(words.xy), four_of(words.zw));
  }
#end
