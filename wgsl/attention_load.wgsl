// Part of the attention kernels: columns 4c .. 4c + 3 of a row of $x, zero beyond its WIDTH elements.
#if VEC
fn load_$x(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>($x[row * W4 + c]); }
  return vec4<f32>(0.0);
}
#else
fn load_$x(row: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { x[e] = f32($x[row * WIDTH + 4u * c + e]); }
  return x;
}
#endif
