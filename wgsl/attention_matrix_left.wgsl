// Part of attention_matrix*.wgsl: the workgroup's rows of one head of $x, from $first on, as left operands $x_0_0_0, $x_0_0_1, ...: of
// a subgroup those of 16 RF rows from $row on. They pass through `tile`, one of LEFT_PARTS parts of their columns at a time.
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
#unroll r RF
#unroll c LEFT_DF
  let $x_at_$part_$r_$c = ($row + 16u * $ru) * (LEFT_W8 + 1u) + 2u * $cu;
  let $x_$part_$r_$c = coopLoadT<coop_mat16x16<f16, A>>(&tile[$x_at_$part_$r_$c].low, ld_left);
#end
#end
  workgroupBarrier();
#end
