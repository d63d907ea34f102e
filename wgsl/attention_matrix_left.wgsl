// Part of attention_matrix*.wgsl: the workgroup's rows of one head of $x, from $first on, as left operands $x_0, $x_1, ..., of
// each subgroup those from $row on. They pass through `tile`.
#include "attention_matrix_load.wgsl" loads=LOADS_ROWS x=$x first=$first end=p.queries tokens=queries heads=$heads head=$head place=0u
  workgroupBarrier();
#unroll c DF
  let $x_at_$c = $row * TILE_LD + 4u * $cu;
  let $x_$c = coopLoadT<coop_mat16x16<f16, A>>(&tile[$x_at_$c], ld);
#end
  workgroupBarrier();
