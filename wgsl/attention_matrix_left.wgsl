// Part of attention_matrix*.wgsl: the workgroup's rows of one head of $x, from $first on, as left operands $x_0_0, $x_0_1, ..., of
// each subgroup those from $row on. They pass through `tile`, one of LEFT_PARTS parts of their columns at a time.
#unroll part LEFT_PARTS
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let token = min($first + at / LEFT_W8, p.queries - 1u);
    let words = $x[((b * p.queries + token) * p.$heads + $head) * W8 + LEFT_W8 * $partu + at % LEFT_W8];
    let to = at / LEFT_W8 * (LEFT_W8 + 1u) + at % LEFT_W8;
    tile[to] = Eight(four_of(words.xy), four_of(words.zw));
  }
#end
  workgroupBarrier();
#unroll c LEFT_DF
  let $x_at_$part_$c = ($row) * (LEFT_W8 + 1u) + 2u * $cu;
  let $x_$part_$c = coopLoadT<coop_mat16x16<f16, A>>(&tile[$x_at_$part_$c].low, ld_left);
#end
  workgroupBarrier();
#end
