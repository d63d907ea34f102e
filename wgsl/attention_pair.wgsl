// Part of the backward kernels: one chunk (4 DC4 columns) of the rows of $x and $y that belong together, from `first` on,
// of one head: this invocation's share, on its way from the arrays to $x_tile and $y_tile.
struct $Pair { $x: array<vec4<f32>, $loads>, $y: array<vec4<f32>, $loads> }

fn fetch_$pair(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> $Pair {
  var both: $Pair;
#unroll n $loads
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.$heads + head;
    both.$x[$n] = vec4<f32>(0.0);
    both.$y[$n] = vec4<f32>(0.0);
    if (at < $count * DC4 && t < p.queries) {
      both.$x[$n] = load_$x(row, chunk * DC4 + at % DC4);
      both.$y[$n] = load_$y(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return both;
}

fn put_$pair(both: $Pair, lid: u32) {
#unroll n $loads
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < $count * DC4) {
      $x_tile$place[at % DC4] = both.$x[$n];
      $y_tile$place[at % DC4] = both.$y[$n];
    }
  }
#end
}
