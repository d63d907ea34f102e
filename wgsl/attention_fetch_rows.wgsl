// Part of the tiled attention kernels: this invocation's share of VN whole rows of $x, from `first` on, of one head. Rows
// from `end` on are not read: beyond a cache's last token there may be anything, and 0 times NaN is not 0.
fn fetch_$x_rows(b: u32, head: u32, first: u32, end: u32, lid: u32) -> array<vec4<f32>, LOADS_FLAT> {
  var x: array<vec4<f32>, LOADS_FLAT>;
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    x[$n] = vec4<f32>(0.0);
    if (at < VN * RD * TX && first + row < end) {
      x[$n] = load_$x((b * p.$tokens + first + row) * p.$heads + head, c);
    }
  }
#end
  return x;
}
