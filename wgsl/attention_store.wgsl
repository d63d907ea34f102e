// Part of the attention kernels: columns 4c .. 4c + 3 of a row of $y, as far as it has WIDTH elements.
#if VEC
fn store_$y(row: u32, c: u32, value: vec4<f32>) { if (c < W4) { $y[row * W4 + c] = $type(value); } }
#else
fn store_$y(row: u32, c: u32, value: vec4<f32>) {
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { $y[row * WIDTH + 4u * c + e] = $type(value[e]); }
}
#endif
